"""Masks with quantisation-aware training, compiled and on two processes, against one eager process."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import as_rank, needs_gloo, run_ranks
from torch import nn
from torch.nn import functional

from openwork.torch import create_compressed_retrain_model, save_compressed_retrain_model
from openwork.torch.quant.apply import quantized_layers
from openwork.torch.sparse24 import masked_layers, masks_of

_STEPS = 4
_CONFIG = """
retrain_data_quant_config {{ ulq_quantize {{ }} }}
retrain_weight_quant_config {{ {weights} {{ channel_wise: true }} }}
batch_num: 2
prune_config {{ n_out_of_m_pruner {{ l1_selective_prune {{ n_out_of_m_type: M4N2 update_freq: {frequency} }} }} }}
"""


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    )


def _model(folder: Path, weights: str = "arq_retrain", frequency: int = 1) -> nn.Module:
    folder.mkdir(exist_ok=True)
    config = folder / "retrain.cfg"
    config.write_text(_CONFIG.format(weights=weights, frequency=frequency))
    return create_compressed_retrain_model(_plain(), _data(0), config, folder / "record.txt")


def _data(step: int) -> torch.Tensor:
    return torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(step))


_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[_COMPILER, pytest.mark.slow])])
@pytest.mark.parametrize(("weights", "frequency"), [("arq_retrain", 1), ("ulq_retrain", 0)])
def test_compiled_training_agrees(weights, frequency, backend, tmp_path):
    torch._dynamo.reset()
    model = _model(tmp_path, weights, frequency)
    assert len(masked_layers(model)) == len(quantized_layers(model)) == 3
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    for step in range(_STEPS):
        for each, run in ((model, compiled), (twin, twin)):
            each.zero_grad()
            functional.cross_entropy(run(_data(step)), torch.arange(4)).backward()
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        masks = masks_of(model), masks_of(twin)
        for (name, own), other in zip(model.named_parameters(), twin.parameters()):
            layer, _, kind = name.rpartition(".")
            if kind == "weight" and layer in masks[0]:
                assert (masks[0][layer] == masks[1][layer]).all()
                # Compiled code leaves pruned weights in the parameter.
                own, other = (each * torch.from_numpy(masks[0][layer]) for each in (own, other))
            torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4, msg=f"{name}, step {step}")
    assert all(layer.input_quant.seen == 2 for layer in quantized_layers(model).values())
    assert torch.equal(model.eval()(_data(9)), copy.deepcopy(model)(_data(9)))
    save_compressed_retrain_model(model, tmp_path / "record.txt", tmp_path / "net", _data(0))
    assert (tmp_path / "net_deploy_model.onnx").is_file()


def _rank(rank: int, folder: Path) -> None:
    model = _model(folder / str(rank))
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        # Each rank has its own half of the batch.
        parallel(_data(step)[2 * rank : 2 * rank + 2]).square().mean().backward()
        optimizer.step()
    masks = {f"mask {name}": mask for name, mask in masks_of(model).items()}
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    np.savez(folder / f"{rank}.npz", **masks, **state)


@needs_gloo
def test_two_processes_train_as_one(tmp_path: Path):
    run_ranks(__file__, tmp_path)
    first, second = (np.load(tmp_path / f"{rank}.npz") for rank in range(2))
    assert sum(key.startswith("mask ") for key in first) == 3
    for key in first:
        np.testing.assert_array_equal(first[key], second[key], err_msg=key)
    single = _model(tmp_path / "single")
    single(_data(0))
    # The clip range is that of both halves of the first batches, not of one rank's own half.
    half = _model(tmp_path / "half")
    half(_data(0)[2:])
    assert half[0].input_quant.clip_max != single[0].input_quant.clip_max
    single = _model(tmp_path / "single")
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    for step in range(_STEPS):
        optimizer.zero_grad()
        single(_data(step)).square().mean().backward()
        optimizer.step()
    for name, mask in masks_of(single).items():
        assert (first[f"mask {name}"] == mask).all()
    for key, value in single.state_dict().items():
        np.testing.assert_allclose(first[key], value.numpy(), rtol=1e-3, atol=1e-4, err_msg=key)


if __name__ == "__main__":
    with as_rank() as (rank, folder):
        _rank(rank, folder)
