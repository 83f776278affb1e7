"""The record file beside checkpoints: nothing is lost from it, and what does not belong together is told."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import openwork.torch as amct
from openwork.errors import NothingToPruneError, RecordError, WeightsError
from openwork.record import load_record
from openwork.torch.sparse24 import masked_layers, verify_sparsity

MASKS = "prune_config { n_out_of_m_pruner { l1_selective_prune { update_freq: %d } } }"
QUANT = (
    " retrain_data_quant_config { ulq_quantize { } } retrain_weight_quant_config { arq_retrain { channel_wise: true } }"
)
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))


def _train(model: nn.Module, steps: int, rate: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()


def _config(folder: Path, text: str) -> Path:
    (folder / "retrain.cfg").write_text(text)
    return folder / "retrain.cfg"


def _both(folder: Path) -> tuple[nn.Module, Path, Path]:
    config, record = _config(folder, MASKS % 1 + QUANT), folder / "record.txt"
    return amct.create_compressed_retrain_model(_net(), (X,), config, record), config, record


def test_a_checkpoint_after_saving_keeps_the_scales(tmp_path: Path) -> None:
    model, _, record = _both(tmp_path)
    _train(model, 1)
    amct.save_compressed_retrain_model(model, record, tmp_path / "net", (X,))
    written = load_record(record)
    assert set(written.factors) == {"0", "2"}
    model.state_dict()
    assert set(load_record(record).factors) == {"0", "2"}
    _train(model, 20, 1.0)  # other masks: the record has to be written again
    model.state_dict()
    again = load_record(record)
    assert set(again.factors) == {"0", "2"}
    assert again.masks["0"] != written.masks["0"]


def test_an_older_checkpoint_beside_a_later_saved_record_is_told(tmp_path: Path, caplog: Any) -> None:
    model, config, record = _both(tmp_path)
    _train(model, 2)
    torch.save(model.state_dict(), tmp_path / "early.pth")
    _train(model, 30, 2.0)
    amct.save_compressed_retrain_model(model, record, tmp_path / "net", (X,))
    late = model.eval()(X)
    torch.save(model.state_dict(), tmp_path / "late.pth")
    caplog.clear()
    restored = amct.restore_compressed_retrain_model(_net(), (X,), config, record, tmp_path / "late.pth")
    assert torch.equal(restored.eval()(X), late)
    assert not caplog.records
    amct.restore_compressed_retrain_model(_net(), (X,), config, record, tmp_path / "early.pth")
    assert "the record was written beside another checkpoint" in caplog.text


def _without_masks(record: Path, count: int) -> Path:
    blocks = re.split(r"(?m)^(?=prune_record \{)", record.read_text())
    record.write_text("".join(blocks[: len(blocks) - count]))
    return record


@pytest.mark.parametrize("quantised", [False, True])
def test_masks_that_the_record_lacks(quantised: bool, tmp_path: Path, caplog: Any) -> None:
    kind = "compressed" if quantised else "prune"
    config, record = _config(tmp_path, MASKS % 1 + (QUANT if quantised else "")), tmp_path / "record.txt"
    model = getattr(amct, f"create_{kind}_retrain_model")(_net(), (X,), config, record)
    _train(model, 1)
    torch.save(model.state_dict(), tmp_path / "net.pth")

    def restored() -> nn.Module:
        files = (config, record) if quantised else (record, config)
        return getattr(amct, f"restore_{kind}_retrain_model")(_net(), (X,), *files, tmp_path / "net.pth")

    assert list(masked_layers(restored())) == ["0", "2"]
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]
    _without_masks(record, 1)
    assert list(masked_layers(restored())) == ["0"]
    assert "asks for a mask of 2, but" in caplog.text
    _without_masks(record, 1)
    message = "has no masks, but .* asks for one of '0'" if quantised else "is empty"
    with pytest.raises(RecordError, match=message):
        restored()


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    config, record = _config(tmp_path, MASKS % 0), tmp_path / "record.txt"
    model = amct.create_prune_retrain_model(_net(), (X,), config, record)
    state = {key: value.int() for key, value in model.state_dict().items()}
    torch.save(state, tmp_path / "net.pth")
    with pytest.raises(WeightsError, match=r"'0\.weight' is torch\.int32; the model needs torch\.float32"):
        amct.restore_prune_retrain_model(_net(), (X,), record, config, tmp_path / "net.pth")


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return functional.linear(self.encoder(x), self.encoder.weight.t())


def test_changing_masks_need_a_weight_that_only_its_layer_reads(tmp_path: Path) -> None:
    with pytest.raises(NothingToPruneError, match="encoder gets no mask: its weight is also read past the layer"):
        amct.create_prune_retrain_model(_Tied(), (X,), _config(tmp_path, MASKS % 1), tmp_path / "record.txt")
    # A mask that stays is in the weight itself, whoever reads it.
    model = amct.create_prune_retrain_model(_Tied(), (X,), _config(tmp_path, MASKS % 0), tmp_path / "record.txt")
    _train(model, 2)
    trained = model.eval()(X)
    amct.save_prune_retrain_model(model, tmp_path / "net", (X,))
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "net_deploy_model.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: X.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), trained.detach(), rtol=1e-4, atol=1e-5)
    assert verify_sparsity(model).held == ("encoder",)


def test_weight_norm_after_a_backward(tmp_path: Path) -> None:
    """Its weight is no leaf of the graph, which copy.deepcopy refuses."""
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 8))
    model = amct.create_prune_retrain_model(net, (X,), _config(tmp_path, MASKS % 1), tmp_path / "record.txt")
    model(X).sum().backward()
    amct.save_prune_retrain_model(model, tmp_path / "net", (X,))
    assert (tmp_path / "net_deploy_model.onnx").exists()


def test_a_dict_as_the_last_argument(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(16, 8)

        def forward(self, given: dict[str, torch.Tensor]) -> Any:
            return self.f(given["x"])

    given = ({"x": X},)
    model = amct.create_prune_retrain_model(Net(), given, _config(tmp_path, MASKS % 0), tmp_path / "record.txt")
    model(*given)
    amct.save_prune_retrain_model(model, tmp_path / "net", given)
    assert (tmp_path / "net_deploy_model.onnx").exists()
