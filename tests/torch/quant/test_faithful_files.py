"""Quantised models of odd architectures: both files compute in onnxruntime what the trained model computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional

import openwork.torch as amct
from openwork.config import QuantSetting
from openwork.errors import ConfigError, FileError, ModelError
from openwork.torch.quant import apply_quant

QUANT = (
    "retrain_data_quant_config { ulq_quantize { } } "
    "retrain_weight_quant_config { arq_retrain { channel_wise: true } } batch_num: 2"
)
ROWS, IMAGES, SEQUENCE = (4, 16), (2, 8, 8, 8), (3, 5, 16)


class _ReluLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(super().forward(x))


class _CosineHead(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


class _NormAndActivation(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu6(super().forward(x))


class _TwoNames(nn.Module):
    """Layer and norm are registered a second time, inside the body that runs them."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3)
        self.after: nn.Module = nn.BatchNorm2d(16) if norm else nn.ReLU()
        if isinstance(self.after, nn.BatchNorm2d):
            self.after.weight.data.fill_(3.0)
        self.body = nn.Sequential(self.conv, self.after)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x * 3)


class _OutputSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.up(x, output_size=(16, 16))


class _Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.f(input=x)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.f(torch.relu(self.f(x)))


class _Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(16, 8)
        self.spare = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.f(x)


class _TakenNames(nn.Module):
    """Its parts have the names that the files' own constants would have."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(8, 8, 3)
        self.quantized_0 = nn.Conv2d(8, 8, 3)
        self.fake_quant_0 = nn.Module()
        self.fake_quant_0.scale = nn.Parameter(torch.full((1,), 7.0))

    def forward(self, x: torch.Tensor) -> Any:
        return self.quantized_0(self.a(x)) * self.fake_quant_0.scale


def _hooked(where: str) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    if where == "before":
        model[0].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    else:
        model[0 if where == "after" else 1].register_forward_hook(lambda module, args, result: result * 3)
    return model


def _dead_channel() -> nn.Module:
    layer = nn.Linear(16, 8)
    layer.weight.data[3] = 0
    layer.weight.data[4] *= 1e-9
    layer.bias.data[3:5] = 5.0
    return nn.Sequential(layer)


def _dead_norm() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16))
    model[1].weight.data[0], model[1].weight.data[1] = 0.0, 1e-12
    model[1].bias.data.fill_(2.0)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "own forward": (lambda: nn.Sequential(_ReluLinear(16, 8)), ROWS),
    "own forward before a norm": (lambda: nn.Sequential(_ReluLinear(16, 8), nn.BatchNorm1d(8)), ROWS),
    "computed weight": (lambda: nn.Sequential(_CosineHead(16, 8)), ROWS),
    "norm with an activation": (lambda: nn.Sequential(nn.Conv2d(8, 16, 3), _NormAndActivation(16)), IMAGES),
    "two names": (lambda: _TwoNames(False), IMAGES),
    "two names and a norm": (lambda: _TwoNames(True), IMAGES),
    "hook before": (lambda: _hooked("before"), IMAGES),
    "hook after": (lambda: _hooked("after"), IMAGES),
    "hook after the norm": (lambda: _hooked("norm"), IMAGES),
    "output size": (_OutputSize, IMAGES),
    "grouped transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(8, 8, 3, groups=2)), IMAGES),
    "keyword": (_Keyword, ROWS),
    "twice": (_Twice, ROWS),
    "not reached": (_Spare, ROWS),
    "transformer": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)),
        SEQUENCE,
    ),
    "taken names": (_TakenNames, IMAGES),
    "dead channel": (_dead_channel, ROWS),
    "dead norm": (_dead_norm, IMAGES),
}


def _trained(model: nn.Module, x: torch.Tensor, folder: Path) -> nn.Module:
    (folder / "quant.cfg").write_text(QUANT)
    quantized = amct.create_compressed_retrain_model(model, (x,), folder / "quant.cfg", folder / "record.txt")
    for _ in range(2):
        quantized(x).square().mean().backward()
    return quantized.eval()


def _run(path: Path, x: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize("name", CASES)
def test_files_compute_what_the_model_computes(name: str, tmp_path: Path, caplog: Any) -> None:
    torch.manual_seed(0)
    build, shape = CASES[name]
    x = torch.randn(shape)
    model = _trained(build(), x, tmp_path)
    amct.save_compressed_retrain_model(model, tmp_path / "record.txt", tmp_path / "net", (x,))
    with torch.no_grad():
        expected = model(x).numpy()
    for kind in ("deploy", "fake_quant"):
        found = _run(tmp_path / f"net_{kind}_model.onnx", x)
        assert found.shape == expected.shape
        # Rounding at a boundary may move single values by a step of 1/255 of the range.
        assert np.abs(found - expected).max() <= 0.01 * np.abs(expected).max(), kind
    assert "onnxruntime" not in "".join(each.message for each in caplog.records if each.name == "openwork")
    if "not reached" not in name:
        operators = [node.op_type for node in onnx.load(tmp_path / "net_deploy_model.onnx").graph.node]
        assert "DequantizeLinear" in operators


def test_a_transformer_layer_simulates_in_evaluation() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(SEQUENCE)
    quantized = apply_quant(model, {"linear1": QuantSetting(), "linear2": QuantSetting()})
    quantized(x)
    quantized.linear1.input_quant.clip_max.data.fill_(0.01)
    with torch.no_grad():
        assert (quantized.eval()(x) - model.eval()(x)).abs().max() > 0.1


class _Lora(nn.Linear):
    """Reads its input twice, once with the quantised weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down = nn.Parameter(torch.randn(4, inputs) * 0.1)
        self.up = nn.Parameter(torch.randn(outputs, 4) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias) + x @ self.down.t() @ self.up.t()


class _Normalised(nn.Linear):
    """The weight meets another input than the quantised one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(functional.normalize(x, dim=-1), self.weight, self.bias)


@pytest.mark.parametrize("kind", [nn.Linear, _Lora, _Normalised, _CosineHead])
def test_weights_are_stored_as_integers_and_data_unsigned(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS)
    model = _trained(nn.Sequential(kind(16, 32), nn.ReLU(), kind(32, 8)), x, tmp_path)
    amct.save_compressed_retrain_model(model, tmp_path / "record.txt", tmp_path / "net", (x,))
    graph = onnx.load(tmp_path / "net_deploy_model.onnx").graph
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert sorted(t.size for t in tensors.values() if t.dtype == np.int8 and t.ndim == 2) == [256, 512]
    assert not [name for name, t in tensors.items() if t.dtype == np.float32 and t.size >= 256]
    for node in graph.node:
        if node.op_type == "QuantizeLinear" and kind in (nn.Linear, _Lora):
            assert tensors[node.input[2]].dtype == np.uint8
    found = _run(tmp_path / "net_deploy_model.onnx", x)
    expected = model(x).detach().numpy()
    assert np.abs(found - expected).max() <= 0.01 * np.abs(expected).max()
    if kind in (nn.Linear, _Lora):
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        options.log_severity_level = 4
        onnxruntime.InferenceSession(tmp_path / "net_deploy_model.onnx", options, providers=["CPUExecutionProvider"])
        optimized = onnx.load(tmp_path / "optimized.onnx").graph
        assert sum(node.op_type == "QGemm" for node in optimized.node) == 2


class _NormInTraining(nn.Module):
    """Its norm takes the statistics of the batch in evaluation too, which torch's exporter leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> Any:
        self.norm.train()
        return self.norm(self.conv(x))


@pytest.mark.parametrize("quantised", [False, True])
def test_an_export_that_changes_the_model_is_told(quantised: bool, tmp_path: Path, caplog: Any) -> None:
    x = torch.randn(IMAGES)
    if quantised:
        model = _trained(_NormInTraining(), x, tmp_path)
        amct.save_compressed_retrain_model(model, tmp_path / "record.txt", tmp_path / "net", (x,))
    else:
        amct.save_prune_retrain_model(_NormInTraining(), tmp_path / "net", (x,))
    assert "net_deploy_model.onnx: in onnxruntime its output differs from the model's by" in caplog.text


def test_grouped_transposed_layers_for_ascend(tmp_path: Path) -> None:
    x = torch.randn(IMAGES)
    (tmp_path / "quant.cfg").write_text(f"{QUANT} target: ASCEND")
    model = amct.create_compressed_retrain_model(
        nn.Sequential(nn.ConvTranspose2d(8, 12, 3, groups=2)), (x,), tmp_path / "quant.cfg", tmp_path / "record.txt"
    )
    model(x)
    amct.save_compressed_retrain_model(model, tmp_path / "record.txt", tmp_path / "net", (x,))
    file = onnx.load(tmp_path / "net_deploy_model.onnx")
    sizes = {tensor.name: list(tensor.dims) for tensor in file.graph.initializer}
    assert sizes["ascend_0.dequant_parameter"] == sizes["ascend_0.bias"] == [12]


def test_names_of_inputs_and_outputs_that_the_files_use(tmp_path: Path) -> None:
    x = torch.randn(ROWS)
    model = _trained(nn.Sequential(nn.Linear(16, 8)), x, tmp_path)
    names = {"input_names": ["quantized_0.weight"], "output_names": ["fake_quant_0.div"]}
    amct.save_compressed_retrain_model(model, tmp_path / "record.txt", tmp_path / "net", (x,), **names)
    for kind in ("deploy", "fake_quant"):
        np.testing.assert_allclose(
            _run(tmp_path / f"net_{kind}_model.onnx", x), model(x).detach().numpy(), rtol=0.01, atol=0.01
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_models_cast_after_training_are_saved_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(ROWS)
    model = _trained(nn.Sequential(nn.Linear(16, 8)), x, tmp_path)
    expected = model(x).detach().numpy()
    amct.save_compressed_retrain_model(model.to(dtype), tmp_path / "record.txt", tmp_path / "net", (x.to(dtype),))
    np.testing.assert_allclose(_run(tmp_path / "net_deploy_model.onnx", x), expected, rtol=0.02, atol=0.02)


class _Tied(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 8)
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(functional.linear(self.encoder(x), self.encoder.weight.t()))


def test_weights_that_are_read_past_their_layer_are_left_alone(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", logger="openwork")
    x = torch.randn(ROWS)
    model = _trained(_Tied(), x, tmp_path)
    assert "encoder is not quantised: its weight is also read past the layer" in caplog.text
    assert not hasattr(model.encoder, "input_quant")
    amct.save_compressed_retrain_model(model, tmp_path / "record.txt", tmp_path / "net", (x,))
    torch.save(model.state_dict(), tmp_path / "net.pth")
    restored = amct.restore_compressed_retrain_model(
        _Tied(), (x,), tmp_path / "quant.cfg", tmp_path / "record.txt", tmp_path / "net.pth"
    )
    assert torch.equal(restored.eval()(x), model(x))


def test_nothing_left_to_quantise_says_why(tmp_path: Path) -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return functional.linear(self.encoder(x), self.encoder.weight.t())

    with pytest.raises(ConfigError, match="encoder is not quantised: its weight is also read past the layer"):
        _trained(Only(), torch.randn(ROWS), tmp_path)


def test_bad_batches_name_the_layer(tmp_path: Path) -> None:
    (tmp_path / "quant.cfg").write_text(QUANT)
    x = torch.randn(ROWS)
    model = amct.create_compressed_retrain_model(
        nn.Sequential(nn.Linear(16, 8)), (x,), tmp_path / "quant.cfg", tmp_path / "record.txt"
    )
    with pytest.raises(ModelError, match="layer '0': its input has NaN or infinity"):
        model(x * float("nan"))
    model(x)
    model[0].input_quant.clip_max.data.fill_(float("nan"))
    with pytest.raises(ModelError, match="layer '0': its learned clip range is not finite"):
        model(x)


@pytest.mark.parametrize("data", [(torch.randn(4, 3),), (None,), (torch.randn(4, 16),) * 2])
def test_inputs_that_do_not_fit_are_named(data: Any, tmp_path: Path) -> None:
    model = _trained(nn.Sequential(nn.Linear(16, 8)), torch.randn(ROWS), tmp_path)
    with pytest.raises(ModelError, match="the forward of Sequential fails on input_data"):
        amct.save_compressed_retrain_model(model, tmp_path / "record.txt", tmp_path / "net", data)
    assert not list(tmp_path.glob("*.onnx"))


def test_the_record_is_not_written_over_a_model_file(tmp_path: Path) -> None:
    x = torch.randn(ROWS)
    model = _trained(nn.Sequential(nn.Linear(16, 8)), x, tmp_path)
    with pytest.raises(FileError, match="is the model file that is to be written"):
        amct.save_compressed_retrain_model(model, tmp_path / "net_deploy_model.onnx", tmp_path / "net", (x,))
    assert not list(tmp_path.glob("*.onnx"))


def test_models_made_in_inference_mode_train(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = _create_only(tmp_path)
    model(torch.randn(ROWS)).sum().backward()
    assert model[0].weight.grad is not None


def _create_only(folder: Path) -> Any:
    (folder / "quant.cfg").write_text(QUANT)
    return amct.create_compressed_retrain_model(
        nn.Sequential(nn.Linear(16, 8)), (torch.randn(ROWS),), folder / "quant.cfg", folder / "record.txt"
    )
