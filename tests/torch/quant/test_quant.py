"""Fake quantisation against NumPy arithmetic, and the ONNX files against torch in onnxruntime."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional

from openwork.config import (
    DataQuantSetting,
    NofMSetting,
    QuantSetting,
    Target,
    WeightAlgorithm,
    WeightQuantSetting,
)
from openwork.errors import ConfigError, ModelError, UnsupportedModelError
from openwork.torch.quant import apply_quant, deploy_model, factors_of, integers_of, quantizable_layers
from openwork.torch.quant.export import export_quantized
from openwork.torch.quant.fake import InputQuant, WeightQuant
from openwork.torch.sparse24 import apply_24

LAYERS = ("a", "b", "c", "up", "hidden", "out")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.norm_a = nn.BatchNorm2d(16)
        self.b = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm_b = nn.BatchNorm2d(16)
        self.c = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.norm_c = nn.BatchNorm2d(16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.hidden = nn.Linear(8, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm_a(self.a(x)))
        x = functional.relu(self.norm_b(self.b(x)))
        branch = self.c(x)
        # Two readers: this batch norm cannot be folded.
        x = functional.relu(self.norm_c(branch) + branch)
        x = self.up(x).mean((2, 3))
        return self.out(functional.relu(self.hidden(x)))


def _x(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def _trained(setting: QuantSetting, masks: bool = True) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = Net()
    with torch.no_grad():
        net.norm_b.weight[::3] *= -1  # type: ignore[union-attr, index, operator]
        net.norm_b.weight[1] = 0  # type: ignore[union-attr, index, operator]
    if masks:
        net = apply_24(net, {name: NofMSetting(update_freq=1) for name in LAYERS[1:]})
    quantized = apply_quant(net, dict.fromkeys(LAYERS, setting), batches=2)
    optimizer = torch.optim.SGD(quantized.parameters(), lr=0.02)
    for step in range(5):
        optimizer.zero_grad()
        functional.cross_entropy(quantized(_x(step)), torch.arange(8) % 4).backward()
        optimizer.step()
    return quantized.eval()


SETTINGS = {
    f"{algorithm.name}-{bits}-{'channel' if each else 'tensor'}": QuantSetting(
        weight=WeightQuantSetting(algorithm, bits, each)
    )
    for algorithm in WeightAlgorithm
    for bits in ("INT8", "INT4")
    for each in (False, True)
}


def _run(path, x: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_files_compute_what_torch_computes(name, tmp_path):
    model = _trained(SETTINGS[name])
    x = _x(9)
    with torch.no_grad():
        expected = model(x)
    layers = integers_of(model, (x,))
    assert {key: layer.norm for key, layer in layers.items() if layer.norm} == {"a": "norm_a", "b": "norm_b"}
    with torch.no_grad():
        torch.testing.assert_close(deploy_model(model, layers)(x), expected, rtol=1e-5, atol=1e-6)
    paths = [tmp_path / "deploy.onnx", tmp_path / "fake.onnx"]
    # torch's two exporters, the faster one most of the time.
    export_quantized(model, layers, paths, (x,), opset=18 if name == "ARQ-INT8-channel" else 17)
    span = float(expected.max() - expected.min())
    # Rounded biases and integer rescaling may move single values across a rounding step.
    assert np.abs(_run(paths[0], x) - expected.numpy()).max() <= 0.05 * span
    np.testing.assert_allclose(_run(paths[1], x), expected.numpy(), rtol=1e-4, atol=1e-5)


def _integer_weights(path) -> dict[str, np.ndarray]:
    """int8 weights by operator node, found without openwork."""
    model = onnx.load(path)
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    made = {node.output[0]: node for node in model.graph.node}
    found = {}
    for number, node in enumerate(model.graph.node):
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            source = made.get(node.input[1])
            name = source.input[0] if source is not None else node.input[1]
            found[f"{node.op_type}{number}"] = tensors[name]
    return found


def test_integers_in_the_file_keep_the_pattern(tmp_path):
    for target in Target:
        model = _trained(SETTINGS["ARQ-INT8-channel"])
        layers = integers_of(model, (_x(),))
        export_quantized(model, layers, [tmp_path / "d.onnx", tmp_path / "f.onnx"], (_x(),), opset=17, target=target)
        weights = list(_integer_weights(tmp_path / "d.onnx").values())
        assert len(weights) == 6
        for weight, axis in zip(weights, (1, 1, 1, 0, 1, 1)):
            assert weight.dtype == np.int8
            if weight.shape[axis] > 3:
                moved = np.moveaxis(weight, axis, -1)
                counts = np.count_nonzero(moved.reshape(*moved.shape[:-1], -1, 4), axis=-1)
                assert counts.max() == 2
        assert np.abs(weights[1]).max() == 127


def test_onnxruntime_runs_integer_kernels(tmp_path):
    model = _trained(SETTINGS["ARQ-INT8-channel"])
    export_quantized(model, integers_of(model, (_x(),)), [tmp_path / "d.onnx", tmp_path / "f.onnx"], (_x(),), opset=17)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(tmp_path / "d.onnx", options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    # A convolution becomes one where its result is quantised next; matrix products always.
    assert "QLinearConv" in kinds
    assert kinds.count("QGemm") == 2


def test_ascend_nodes(tmp_path):
    model = _trained(SETTINGS["ARQ-INT8-channel"])
    layers = integers_of(model, (_x(),))
    export_quantized(model, layers, [tmp_path / "d.onnx", tmp_path / "f.onnx"], (_x(),), target=Target.ASCEND)
    graph = onnx.load(tmp_path / "d.onnx").graph
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    readers = {name: node for node in graph.node for name in node.input}
    quantizers = [node for node in graph.node if node.op_type == "AscendQuant"]
    assert len(quantizers) == 6
    assert not any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in graph.node)
    for node, layer in zip(quantizers, layers.values()):
        attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert attributes["scale"] == pytest.approx(1 / layer.data.scale, rel=1e-6)
        assert attributes["offset"] == layer.data.offset
        assert attributes["dst_type"] == b"INT8"
        operator = readers[node.output[0]]
        np.testing.assert_array_equal(tensors[operator.input[1]], layer.weight.numpy())
        dequant = readers[operator.output[0]]
        assert dequant.op_type == "AscendDequant"
        parameter = tensors[dequant.input[1]]
        assert parameter.dtype == np.uint64
        low = (parameter & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
        np.testing.assert_allclose(low, layer.scale.numpy() * layer.data.scale, rtol=1e-6)
        if layer.bias is not None:
            bias = tensors[operator.input[2]]
            assert bias.dtype == np.int32
            # The nearest step to the bias; float32 scales may move a tie.
            assert np.abs(bias * low.astype(np.float64) - layer.bias.numpy()).max() <= 0.51 * low.max()


def test_input_quantisation_is_the_rule_written_out():
    quant = InputQuant(DataQuantSetting(), 1, "cpu")
    x = torch.tensor([-0.3, 0.0, 0.2, 1.5, 3.7])
    quant(x)
    quant.eval()
    scale = np.float32(3.7 + 0.3) / np.float32(255)
    offset = np.rint(-128 + 0.3 / scale)
    integers = np.clip(np.rint(np.array([-9, -0.3, 0, 0.2, 1.5, 3.7, 50]) / scale) + offset, -128, 127)
    expected = (integers - offset) * scale
    result = quant(torch.tensor([-9, -0.3, 0, 0.2, 1.5, 3.7, 50])).detach().numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    factors = quant.factors()
    assert factors.offset == offset
    assert factors.scale == pytest.approx(scale, rel=1e-6)


def test_ranges_of_data_without_negatives_start_at_zero_and_stay():
    quant = InputQuant(DataQuantSetting(), 2, "cpu")
    for top in (1.0, 3.0, 9.0):
        quant(torch.linspace(0, top, 50)).sum().backward()
    assert float(quant.clip_max) == 3.0
    assert quant.factors().offset == -128
    assert quant.clip_min.grad is None or float(quant.clip_min.grad) == 0
    assert quant.clip_max.grad is not None


def test_given_ranges_need_no_data_and_can_be_learned():
    quant = InputQuant(DataQuantSetting(clip_max=1.0, clip_min=-1.0, fixed_min=False), 4, "cpu")
    assert quant.calibrated
    x = torch.linspace(-3, 3, 100)
    functional.mse_loss(quant(x), x).backward()
    # The data reach further: both ends are pulled outwards.
    assert float(quant.clip_max.grad) < 0 < float(quant.clip_min.grad)


@pytest.mark.parametrize("channel_wise", [False, True])
@pytest.mark.parametrize("algorithm", list(WeightAlgorithm))
def test_weights_are_symmetric_and_zeros_stay_zero(algorithm, channel_wise):
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    weight[:, ::2] = 0
    quant = WeightQuant(WeightQuantSetting(algorithm, "INT8", channel_wise), weight, 0)
    result = quant(weight).detach().numpy()
    largest = np.abs(weight.numpy()).max(axis=1, keepdims=True) if channel_wise else np.abs(weight.numpy()).max()
    step = largest / 127
    np.testing.assert_allclose(result, np.rint(weight.numpy() / step) * step, rtol=1e-5, atol=1e-7)
    assert (result[:, ::2] == 0).all()
    integers, scale = quant.integers(weight)
    assert scale.shape == (6,)
    np.testing.assert_array_equal(integers.numpy(), np.rint(weight.numpy() / step))


def test_gradients_reach_learned_scales():
    weight = torch.randn(6, 8)
    for channel_wise in (False, True):
        quant = WeightQuant(WeightQuantSetting(WeightAlgorithm.ULQ, "INT4", channel_wise), weight, 0)
        quant(weight).square().sum().backward()
        assert quant.scale.grad.abs().min() > 0


def test_scales_in_the_record_give_back_the_weights():
    model = _trained(SETTINGS["ARQ-INT8-tensor"])
    layers = integers_of(model, (_x(),))
    for name, factor in factors_of(layers).items():
        assert factor.scale_d == pytest.approx(layers[name].data.scale)
        assert factor.offset_d == layers[name].data.offset
        assert factor.scale_w.size in (1, layers[name].scale.numel())
        assert not factor.offset_w.any()
    assert factors_of(layers)["out"].scale_w.size == 1


def test_copies_pickles_and_checkpoints_keep_everything():
    model = _trained(SETTINGS["ULQ-INT8-channel"])
    stream = io.BytesIO()
    pickle.dump(model, stream)
    stream.seek(0)
    fresh = apply_quant(
        apply_24(Net(), {name: NofMSetting(update_freq=1) for name in LAYERS[1:]}),
        dict.fromkeys(LAYERS, SETTINGS["ULQ-INT8-channel"]),
        batches=2,
    ).eval()
    fresh.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.load(stream), fresh):
        torch.testing.assert_close(other(_x()), model(_x()), rtol=0, atol=0)
    assert {type(layer).__name__ for layer in model.children()} >= {"Conv2d", "Linear", "ConvTranspose2d"}
    plain = set(Net().state_dict())
    added = set(model.state_dict()) - plain
    assert plain <= set(model.state_dict())
    assert all(".input_quant." in key or ".weight_quant." in key for key in added)


def test_bfloat16_and_autocast():
    model = _trained(SETTINGS["ARQ-INT8-channel"]).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(_x())
    output.float().sum().backward()
    assert torch.isfinite(output.float()).all()


def test_saving_without_calibration_is_refused():
    model = apply_quant(Net(), {"a": QuantSetting()})
    with pytest.raises(ModelError, match=r"'a'.*never calibrated"):
        integers_of(model, (_x(),))


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (-1.0, float("nan"), r"is not finite \(-1 to nan\): training diverged"),
        (float("-inf"), 1.0, r"is not finite \(-inf to 1\): training diverged"),
        (0.5, -0.25, r"has crossed ends \(0.5 to -0.25\): training diverged"),
        (-1e-9, 1e-9, r"has no width \(-1e-09 to 1e-09\): training diverged"),
    ],
)
def test_ranges_that_diverged_are_told_from_missing_ones(low, high, words):
    model = apply_quant(Net(), {"a": QuantSetting()})
    model.train()(_x())
    with torch.no_grad():
        model.a.input_quant.clip_min.fill_(low)
        model.a.input_quant.clip_max.fill_(high)
    with pytest.raises(ModelError, match=f"layer 'a': its learned clip range {words}") as caught:
        integers_of(model, (_x(),))
    assert "calibrated" not in str(caught.value)


@pytest.mark.parametrize("algorithm", list(WeightAlgorithm))
def test_weights_that_diverged_are_named(algorithm):
    model = apply_quant(Net(), {"a": QuantSetting(weight=WeightQuantSetting(algorithm))})
    model.train()(_x())
    with torch.no_grad():
        (model.a.weight_quant.scale if algorithm is WeightAlgorithm.ULQ else model.a.weight).fill_(float("nan"))
    with pytest.raises(ModelError, match=r"layer 'a': its .*weight.* has NaN or infinity: training diverged"):
        integers_of(model, (_x(),))


def test_a_layer_that_sees_nothing_but_zeros_is_saved():
    model = apply_quant(nn.Sequential(nn.Linear(4, 4)), {"0": QuantSetting()})
    zeros = torch.zeros(2, 4)
    model.train()(zeros)
    assert integers_of(model, (zeros,))["0"].data.offset == -128


def test_what_cannot_be_quantised():
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared[1].weight = shared[0].weight
    assert all("shared" in why for why in quantizable_layers(shared).values())
    with pytest.raises(ConfigError, match="shared"):
        apply_quant(shared, {"0": QuantSetting()})
    with pytest.raises(ConfigError, match="did you mean 'hidden'"):
        apply_quant(Net(), {"hiden": QuantSetting()})
    with pytest.raises(UnsupportedModelError, match="already"):
        apply_quant(apply_quant(Net(), {"a": QuantSetting()}), {"b": QuantSetting()})
    broken = Net()
    with torch.no_grad():
        broken.a.weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        apply_quant(broken, {"a": QuantSetting()})


def test_calibration_counts_the_batches_asked_for():
    model = apply_quant(Net(), {"a": QuantSetting()}, batches=3)
    for step in range(5):
        model(_x(step) * (step + 1))
    top = max(float((_x(step) * (step + 1)).max()) for step in range(3))
    assert float(model.a.input_quant.clip_max) == pytest.approx(top)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


CHAIN = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 16, 3),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64, 4),
)


@pytest.mark.parametrize(("net", "shape"), [(CHAIN, (2, 3, 8, 8)), (Tokens(), (2, 5, 16))], ids=["chain", "tokens"])
def test_every_layer_of_a_chain_runs_in_integers(net, shape, tmp_path):
    x = torch.randn(shape)
    names = list(quantizable_layers(net))
    model = apply_quant(net, dict.fromkeys(names, QuantSetting(weight=WeightQuantSetting(channel_wise=True))))
    model(x)
    model.eval()
    export_quantized(model, integers_of(model, (x,)), [tmp_path / "d.onnx", tmp_path / "f.onnx"], (x,), opset=17)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(tmp_path / "d.onnx", options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    integer = [kind for kind in kinds if kind in ("QLinearConv", "QGemm", "MatMulIntegerToFloat", "QLinearMatMul")]
    assert len(integer) == len(names)
    assert not {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul"} & set(kinds)
    with torch.no_grad():
        expected = model(x).numpy()
    assert np.abs(_run(tmp_path / "d.onnx", x) - expected).max() <= 0.05 * (expected.max() - expected.min())
