"""The report on torch modules and ONNX files."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from openwork.config import NofMSetting
from openwork.errors import FileError
from openwork.torch.sparse24 import apply_24, finalize, verify_sparsity


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 2), nn.Flatten(), nn.Linear(128, 4)
    )


def test_modules_before_during_and_after():
    model = _model()
    assert verify_sparsity(model).held == ()
    assert verify_sparsity(model)["2"].reason.startswith("144 of 144 groups")
    masked = apply_24(model, {name: NofMSetting(update_freq=1) for name in ("2", "3", "5")})
    masked(torch.ones(1, 3, 7, 7))
    for report in (verify_sparsity(masked), verify_sparsity(finalize(masked))):
        assert report.held == ("2", "3", "5")
        assert report["5"].zeros == 0.5
        assert not report["0"].holds
        assert "more than 2 non-zeros, first at [0, 0, 0, 0]" in report["0"].reason
        assert "3 of 4 layers hold 2:4" in str(report)


def test_exported_files(tmp_path):
    masked = apply_24(_model(), {name: NofMSetting() for name in ("2", "3", "5")})
    torch.onnx.export(
        finalize(masked).eval(), (torch.ones(1, 3, 7, 7),), tmp_path / "m.onnx", dynamo=False, opset_version=17
    )
    report = verify_sparsity(tmp_path / "m.onnx")
    assert [(layer.kind, layer.holds) for layer in report] == [
        ("Conv", False),
        ("Conv", True),
        ("ConvTranspose", True),
        ("Gemm", True),
    ]


def _file(tmp_path, nodes, tensors):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    onnx.save(helper.make_model(graph), tmp_path / "f.onnx")
    return verify_sparsity(tmp_path / "f.onnx")


def test_weights_behind_other_nodes(tmp_path):
    weight = np.tile(np.array([1, 0, 0, 2], dtype=np.int8), (6, 2))
    node = helper.make_node
    hidden = [
        node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=0),
        node("Transpose", ["d"], ["t"]),
        node("Identity", ["t"], ["i"]),
        node("MatMul", ["x", "i"], ["y"], name="product"),
    ]
    scales = {"s": np.ones(6, np.float32), "z": np.zeros(6, np.int8)}
    assert _file(tmp_path, hidden, {"w": weight, **scales})["product"].holds
    # Another zero point: what is stored as 0 is no zero.
    assert not _file(tmp_path, hidden, {"w": weight, **scales, "z": np.ones(6, np.int8)})["product"].holds
    integer = [node("MatMulInteger", ["x", "w"], ["y"], name="product")]
    assert _file(tmp_path, integer, {"w": np.ascontiguousarray(weight.T)})["product"].holds
    assert not _file(tmp_path, integer, {"w": weight[:, :4].copy()})["product"].holds
    computed = [node("Relu", ["x"], ["w"]), node("MatMul", ["x", "w"], ["y"], name="product")]
    assert "Relu" in _file(tmp_path, computed, {})["product"].reason
    reshaped = [node("Reshape", ["w", "size"], ["r"]), node("Conv", ["x", "r"], ["y"], name="product")]
    sizes = np.array([6, 8, 1, 1])
    assert _file(tmp_path, reshaped, {"w": weight.astype(np.float32), "size": sizes})["product"].holds


def test_files_that_are_no_models(tmp_path):
    with pytest.raises(FileError, match="does not exist"):
        verify_sparsity(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(FileError, match="not an ONNX file"):
        verify_sparsity(tmp_path / "text.onnx")


def test_paths_of_no_file(tmp_path):
    with pytest.raises(FileError, match="is a folder"):
        verify_sparsity(tmp_path)
    with pytest.raises(FileError, match="model is None"):
        verify_sparsity(None)
