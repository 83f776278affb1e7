"""Pruned transformers go through save_pretrained and from_pretrained, or are told why they cannot."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nets.zoo import allow_torchvision
from openwork.torch import (
    PrunePlan,
    analyze,
    create_prune_retrain_model,
    prune,
    restore_prune_retrain_model,
    verify,
)

allow_torchvision()
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.zoo

IDS = torch.randint(5, 90, (2, 7), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": IDS}
TEXT = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"intermediate_size": 96, "max_position_embeddings": 64}
# Sizes that other numbers are equal to by chance: 2 layers and 2 key/value heads, 64 positions and 64 channels.
GROUPED = TEXT | {"num_key_value_heads": 2, "eos_token_id": 64, "pad_token_id": 4, "bos_token_id": 2}


def _model(kind: str, config: str, **options: Any) -> Any:
    torch.manual_seed(0)
    made = getattr(transformers, config)(**options)
    return getattr(transformers, kind)(made).eval()


CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        GROUPED,
        {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        GROUPED,
        {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        TEXT,
        {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
        {"n_embd": 32, "n_head": 2},
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 99, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
        {"dim": 32, "n_heads": 2, "hidden_dim": 64},
    ),
}


def _numbers(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name != "transformers_version"}


def _warnings(caplog: Any) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "openwork" and record.levelno == logging.WARNING]


def _through_files(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


def _same_output(first: Any, second: Any, **inputs: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(first(**inputs)[0], second(**inputs)[0])


@pytest.mark.parametrize("name", CASES)
def test_a_pruned_transformer_loads_again(name: str, tmp_path: Path, caplog: Any) -> None:
    kind, config, options, new = CASES[name]
    model = _model(kind, config, **options)
    before, random = _numbers(model.config), torch.get_rng_state()
    pruned, plan = prune(model, INPUTS)
    assert torch.equal(torch.get_rng_state(), random)
    assert _numbers(model.config) == before
    assert _numbers(pruned.config) == before | new  # and nothing that has such a size by chance
    assert not _warnings(caplog)
    assert verify(model, pruned, plan, INPUTS) < 1e-5
    again = _through_files(pruned, tmp_path / "saved")
    assert _same_output(again, pruned, input_ids=IDS)
    plan.save(tmp_path / "plan.json")
    applied = PrunePlan.load(tmp_path / "plan.json").apply(model)
    assert _numbers(applied.config) == before | new


def test_a_pruned_language_model_generates(tmp_path: Path) -> None:
    kind, config, options, _ = CASES["llama"]
    pruned, _ = prune(_model(kind, config, **options), INPUTS)
    again = _through_files(pruned, tmp_path)
    given = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(pruned.generate(IDS, **given), again.generate(IDS, **given))
    assert pruned.generate(IDS, **given).shape[1] > IDS.shape[1]


def test_sizes_in_lists(tmp_path: Path) -> None:
    model = _model(
        "ConvNextV2ForImageClassification", "ConvNextV2Config", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2
    )
    image = {"pixel_values": torch.randn(1, 3, 64, 64)}
    pruned, _ = prune(model, image, ratio=0.25)
    assert pruned.config.hidden_sizes == [12, 24]
    assert _same_output(_through_files(pruned, tmp_path), pruned, **image)


def test_constants_that_the_class_computes_from_the_config_must_stay(tmp_path: Path, caplog: Any) -> None:
    """Gemma multiplies embeddings by the root of the width: a narrower config would compute something else."""
    model = _model("GemmaForCausalLM", "GemmaConfig", **GROUPED, head_dim=16)
    before = _numbers(model.config)
    pruned, _ = prune(model, INPUTS)
    assert _numbers(pruned.config) == before
    (record,) = _warnings(caplog)
    assert "the config of GemmaForCausalLM keeps its old sizes" in record.message
    assert "model.embed_tokens.embed_scale" in record.message
    caplog.clear()
    pruned, _ = prune(model, INPUTS, skip=["model.embed_tokens"])
    assert not _warnings(caplog)
    assert (pruned.config.hidden_size, pruned.config.intermediate_size) == (64, 48)
    assert _same_output(_through_files(pruned, tmp_path), pruned, input_ids=IDS)


def test_layers_of_different_widths_have_no_config(caplog: Any) -> None:
    kind, config, options, _ = CASES["llama"]
    model = _model(kind, config, **options)
    before = _numbers(model.config)
    group = analyze(model, INPUTS).group_of("model.layers.1.mlp.gate_proj.weight")
    assert group is not None
    pruned, _ = prune(model, INPUTS, groups={group.index: np.arange(10)})
    assert _numbers(pruned.config) == before
    assert re.search(
        r"no values give model\.layers\.[01]\.mlp\.gate_proj\.weight the shape \[(96|86), 64\]", caplog.text
    )


def test_a_transformer_inside_another_model(tmp_path: Path) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = _model("BertModel", "BertConfig", **TEXT)
            self.head = nn.Linear(64, 3)

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(self.encoder(ids).last_hidden_state[:, 0])

    model = Classifier().eval()
    pruned, plan = prune(model, IDS)
    assert verify(model, pruned, plan, IDS) < 1e-5
    assert model.encoder.config.hidden_size == 64
    assert pruned.encoder.config.hidden_size == 32
    assert pruned.encoder.config.num_attention_heads == 2
    assert _same_output(_through_files(pruned.encoder, tmp_path), pruned.encoder, input_ids=IDS)


def test_the_record_keeps_the_config(tmp_path: Path) -> None:
    kind, config, options, new = CASES["bert"]
    model = _model(kind, config, **options)
    settings, record = tmp_path / "prune.cfg", tmp_path / "record.txt"
    settings.write_text("prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }")
    pruned = create_prune_retrain_model(model, IDS, settings, record)
    expected = _numbers(model.config) | new
    assert _numbers(pruned.config) == expected
    torch.save(pruned.state_dict(), tmp_path / "weights.pth")
    restored = restore_prune_retrain_model(model, IDS, record, settings, tmp_path / "weights.pth")
    assert _numbers(restored.config) == expected
    assert _same_output(_through_files(restored.eval(), tmp_path / "saved"), pruned.eval(), input_ids=IDS)
