"""Integers that were folded into floats come back; floats that are none stay."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from openwork.convert._integers import restore_integers

RANDOM = np.random.default_rng(0)


def model(weight: np.ndarray, opset: int = 17) -> onnx.ModelProto:
    """Convolution or product of one weight."""
    convolution = weight.ndim == 4
    shape = [1, weight.shape[1], 6, 6] if convolution else [2, weight.shape[0]]
    node = helper.make_node("Conv" if convolution else "MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b", "c", "d"][: weight.ndim])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def run(proto: onnx.ModelProto) -> np.ndarray:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # As the file says: the runtime's fusions of int8 weights round the activations too.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    shape = session.get_inputs()[0].shape
    return session.run(None, {"x": np.random.default_rng(1).standard_normal(shape, dtype=np.float32)})[0]


@pytest.mark.parametrize(
    ("shape", "order", "axis"), [((3, 3, 8, 12), (3, 2, 0, 1), 0), ((8, 12), (0, 1), 1), ((12, 8), (1, 0), 1)]
)
@pytest.mark.parametrize("turned", [False, True])
def test_integers_come_back(shape: tuple[int, ...], order: tuple[int, ...], axis: int, turned: bool) -> None:
    integers = RANDOM.integers(-127, 128, shape).astype(np.int8)
    scale = RANDOM.uniform(0.001, 0.02, 12).astype(np.float32)
    if turned:  # a folded batch norm with negative factors
        scale[::3] *= -1
    moved = np.ascontiguousarray(integers.transpose(order))
    weight = (moved * scale.reshape([-1 if place == axis else 1 for place in range(moved.ndim)])).astype(np.float32)
    proto = model(weight)
    before = run(proto)
    assert restore_integers(proto, [RANDOM.integers(-9, 9, shape).astype(np.int8), integers]) == 1
    onnx.checker.check_model(proto)
    stored = {item.name: item for item in proto.graph.initializer}
    assert "w" not in stored
    assert stored["w.integers"].data_type == TensorProto.INT8
    assert (np.abs(numpy_helper.to_array(stored["w.integers"]).astype(int)) == np.abs(moved.astype(int))).all()
    assert (numpy_helper.to_array(stored["w.scale"]) > 0).all()
    np.testing.assert_allclose(run(proto), before, atol=1e-4 * np.abs(before).max())


def test_other_weights_stay() -> None:
    integers = RANDOM.integers(-127, 128, (8, 12)).astype(np.int8)
    weight = (integers * np.float32(0.01)).astype(np.float32)
    weight[3, 4] += 0.004
    for proto in (model(weight), model((integers * np.float32(0.01)).astype(np.float32), opset=12)):
        before = proto.SerializeToString()
        assert restore_integers(proto, [integers]) == 0
        assert proto.SerializeToString() == before
