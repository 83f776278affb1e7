"""Mixtures of experts: one width for all experts of a layer, rows aligned as the grouped kernels ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nets.zoo import allow_torchvision
from openwork.torch import analyze, prune, verify

allow_torchvision()
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.zoo

INPUTS = {"input_ids": torch.randint(5, 90, (1, 7), generator=torch.Generator().manual_seed(0))}
SIZES = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 128, "initializer_range": 0.2}
MODELS = {
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 96},
    ),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
}


def _model(name: str) -> Any:
    kind, config, more = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**SIZES, **more)).eval()


@pytest.mark.parametrize("ratio", [0.5, 0.3])
@pytest.mark.parametrize("name", MODELS)
def test_experts_lose_the_same_channels(name: str, ratio: float) -> None:
    model = _model(name)
    pruned, plan = prune(model, INPUTS, ratio=ratio)
    assert verify(model, pruned, plan, INPUTS) < 1e-5
    pruned(**INPUTS)[0].sum().backward()  # also with rows of 44 channels: multiples of 16 bytes
    before, after = (dict(each.named_parameters()) for each in (model, pruned))
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    assert after[experts].shape[0] == before[experts].shape[0] == 4
    for axis in (1, 2):
        assert after[experts].shape[axis] <= (1 - ratio) * before[experts].shape[axis] + 4
    assert sum(p.numel() for p in after.values()) < (1 - 0.9 * ratio) * sum(p.numel() for p in before.values())


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 4), (torch.bfloat16, 8)])
def test_steps_are_aligned(dtype: torch.dtype, step: int) -> None:
    group = analyze(_model("mixtral").to(dtype), INPUTS).group_of("model.layers.0.mlp.experts.down_proj", axis=2)
    assert group is not None
    assert group.units == 128
    assert group.steps.tolist() == [step]


def test_a_pruned_mixture_loads_again(tmp_path: Path) -> None:
    pruned, _ = prune(_model("mixtral"), INPUTS)
    assert (pruned.config.hidden_size, pruned.config.intermediate_size) == (32, 64)
    pruned.save_pretrained(tmp_path)
    again = type(pruned).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(**INPUTS)[0], pruned(**INPUTS)[0])
