"""Ten thousand weights of every type, axis and operator through convert and decompress; random graphs through all."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from convert_models import convert_and_check, finite_24, info, initializer, model_of
from openwork.convert.job import Options, convert, decompress
from weights24 import random_24

DTYPES = [
    *(np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8),
    *(np.int16, np.int32, ml_dtypes.int4, ml_dtypes.uint4),
]


def _layer(rng, place, dtype):
    """(node, initializers) of one random layer whose weight has ragged sizes and special values."""
    kind = str(rng.choice(["Conv", "ConvTranspose", "Gemm", "MatMul", "left", "batched", "QDQ", "integer"]))
    small = lambda: int(rng.integers(1, 5))  # noqa: E731
    cin = int(rng.integers(3, 40))
    zero_point, blocks = 0, 1
    integer = np.dtype(dtype).kind in "iu" or "int4" in np.dtype(dtype).name
    if kind in ("QDQ", "integer") and np.dtype(dtype).name in ("uint8", "uint4"):
        zero_point = int(rng.integers(0, 16))
    attributes = {}
    if kind == "Conv":
        shape, axis = (small(), cin, *[small() for _ in range(int(rng.integers(1, 4)))]), 1
        attributes["group"] = 1
    elif kind == "ConvTranspose":
        blocks = int(rng.integers(1, 4))
        shape, axis = (blocks * cin, small(), *[small() for _ in range(int(rng.integers(1, 4)))]), 0
        attributes["group"] = blocks
    elif kind == "Gemm":
        attributes["transB"] = int(rng.integers(2))
        shape, axis = ((small(), cin), 1) if attributes["transB"] else ((cin, small()), 0)
    elif kind == "left":
        shape, axis = (small(), cin), 1
    elif kind == "batched":
        shape, axis = (small(), small(), cin, small()), 2
    else:
        shape, axis = (cin, small()), 0
    weight = random_24(rng, shape, axis, blocks, dtype, zero_point)
    name, out = f"w{place}", f"y{place}"
    inits = [initializer(name, weight)]
    if kind == "integer" and integer:
        inits.append(initializer(f"z{place}", np.array(zero_point).astype(dtype)))
        node = [helper.make_node("MatMulInteger", ["x", name, "", f"z{place}"], [out])]
    elif kind == "QDQ" and integer:
        inits.append(initializer(f"s{place}", np.float32(0.5)))
        inits.append(initializer(f"z{place}", np.array(zero_point).astype(dtype)))
        node = [
            helper.make_node("DequantizeLinear", [name, f"s{place}", f"z{place}"], [f"d{place}"]),
            helper.make_node("MatMul", ["x", f"d{place}"], [out]),
        ]
    elif kind == "left":
        node = [helper.make_node("MatMul", [name, "x"], [out])]
    else:
        operator = kind if kind in ("Conv", "ConvTranspose", "Gemm") else "MatMul"
        if zero_point:
            return _layer(rng, place, np.float32)
        node = [helper.make_node(operator, ["x", name], [out], **attributes)]
    return node, inits


@pytest.mark.slow
def test_ten_thousand_weights(tmp_path):
    rng = np.random.default_rng(2024)
    qualified = looked_at = 0
    for model_number in range(25):
        nodes, inits = [], []
        for place in range(400):
            node, tensors = _layer(rng, place, DTYPES[int(rng.integers(len(DTYPES)))])
            nodes += node
            inits += tensors
        opset = int(rng.choice([9, 11, 12, 13, 17, 21]))
        model = model_of(nodes, [info("x", None)], [info("y0", None)], inits, opset=opset, ir=8)
        path = tmp_path / "model.onnx"
        path.write_bytes(model.SerializeToString())
        report = convert(Options(str(path), str(tmp_path / "out"), sparsity=1))
        looked_at += len(report.layers)
        qualified += report.qualifying
        for layer in report.layers:
            assert layer.qualifies or layer.reason.startswith("too small"), layer
        decompress(str(tmp_path / "out.onnx"), str(tmp_path / "back.onnx"))
        assert (tmp_path / "back.onnx").read_bytes() == path.read_bytes(), model_number
    assert looked_at == 10_000
    # Very narrow ones do not pay; most do.
    assert qualified > 6_000


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("opset", [9, 17])
def test_decoding_in_onnxruntime_keeps_every_bit(tmp_path, dtype, opset):
    """The functions' decoding itself, NaN payloads and signs of zeros included."""
    import onnxruntime

    if np.dtype(dtype).name == "bfloat16" and opset < 13:
        pytest.skip("bfloat16 came with opset 13")
    weight = random_24(np.random.default_rng(6), (50, 37), 1, 1, dtype)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = model_of(
        [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)],
        [info("x", [1, 37], kind)],
        [info("y", [1, 50], kind)],
        [initializer("w", weight)],
        opset=opset,
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    convert(Options(str(path), str(tmp_path / "out"), sparsity=1))
    converted = onnx.load(tmp_path / "out.onnx")
    # Take the decoding out of the function, and the product away: what is left gives the weight.
    function = converted.functions[0]
    assert function.node[-1].op_type == "Gemm"
    decoded = function.node[-1].input[1]
    del function.node[-1]
    function.output[0] = decoded
    for name in ("transB",):
        function.attribute.remove(name)
    call = converted.graph.node[0]
    kept = [attribute for attribute in call.attribute if attribute.name != "transB"]
    del call.attribute[:]
    call.attribute.extend(kept)
    del converted.graph.input[:], converted.graph.value_info[:]
    position = list(function.input).index("x")
    del function.input[position], call.input[position]
    converted.graph.output[0].CopyFrom(info("y", [50, 37], kind))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(converted.SerializeToString(), options)
    value = session.run_with_ort_values(["y"], {})[0]
    raw = np.ctypeslib.as_array(
        (np.ctypeslib.ctypes.c_uint8 * weight.nbytes).from_address(value.data_ptr())  # type: ignore[attr-defined]
    )
    assert raw.tobytes() == weight.tobytes()


KINDS = ["conv", "grouped", "pointwise", "deconv", "relu", "add", "channel matmul", "again"]


@st.composite
def graphs(draw):
    """A chain of layers over [batch, channels, 5, 5] with branches, constants in odd places and shared weights."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    opset = draw(st.sampled_from([7, 9, 11, 12, 13, 17, 21]))
    channels = start = draw(st.integers(1, 20))
    nodes, inits, current, shared = [], [], "x", {}
    for place in range(draw(st.integers(1, 5))):
        kind = draw(
            st.sampled_from(["conv", "grouped", "pointwise", "deconv", "relu", "add", "channel matmul", "again"])
        )
        out, name = f"t{place}", f"w{place}"
        if kind == "again" and (channels, channels) in shared:
            nodes.append(helper.make_node("Conv", [current, shared[(channels, channels)]], [out]))
        elif kind in ("conv", "pointwise", "again"):
            size = 3 if kind == "conv" else 1
            new = channels if kind == "again" else draw(st.integers(1, 20))
            weight = finite_24(rng, (new, channels, size, size), 1, minus=draw(st.booleans()))
            if draw(st.integers(0, 3)) == 0:
                weight[..., 0, 0] = 1.25
            inits.append(initializer(name, weight))
            source = name
            if draw(st.booleans()):
                nodes.append(helper.make_node("Identity", [name], [f"i{place}"]))
                source = f"i{place}"
            inputs = [current, source]
            if draw(st.booleans()):
                inits.append(initializer(f"b{place}", rng.standard_normal(new).astype(np.float32)))
                inputs.append(f"b{place}")
            nodes.append(helper.make_node("Conv", inputs, [out], pads=[size // 2] * 4))
            if size == 1:
                shared[(new, channels)] = name
            channels = new
        elif kind == "grouped":
            inits.append(initializer(name, finite_24(rng, (2 * channels, channels, 1, 1), 1)))
            nodes.append(helper.make_node("Concat", [current, current], [f"c{place}"], axis=1))
            nodes.append(helper.make_node("Conv", [f"c{place}", name], [out], group=2))
            channels *= 2
        elif kind == "deconv":
            new = draw(st.integers(1, 12))
            inits.append(initializer(name, finite_24(rng, (channels, new, 1, 1), 0, minus=True)))
            nodes.append(helper.make_node("ConvTranspose", [current, name], [out]))
            channels = new
        elif kind == "channel matmul":
            new = draw(st.integers(1, 20))
            turned = numpy_helper.from_array(finite_24(rng, (new, channels), 1), "inner")
            nodes.append(helper.make_node("Constant", [], [name], value=turned))
            nodes.append(helper.make_node("Transpose", [name], [f"wt{place}"], perm=[1, 0]))
            nodes.append(helper.make_node("Transpose", [current], [f"a{place}"], perm=[0, 2, 3, 1]))
            nodes.append(helper.make_node("MatMul", [f"a{place}", f"wt{place}"], [f"p{place}"]))
            nodes.append(helper.make_node("Transpose", [f"p{place}"], [out], perm=[0, 3, 1, 2]))
            channels = new
        elif kind == "add":
            nodes.append(helper.make_node("Add", [current, current], [out]))
        else:
            nodes.append(helper.make_node("Relu", [current], [out]))
        current = out
    model = model_of(
        nodes,
        [info("x", ["n", start, 5, 5])],
        [info(current, ["n", None, 5, 5])],
        inits,
        opset=opset,
        ir={7: 4, 9: 4, 11: 6, 12: 7, 13: 7, 17: 8, 21: 10}[opset],
    )
    return model, rng, start


@given(graphs())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_graphs(tmp_path_factory, drawn):
    model, rng, channels = drawn
    feed = {"x": rng.standard_normal((2, channels, 5, 5)).astype(np.float32)}
    convert_and_check(model, tmp_path_factory.mktemp("graph"), feed)
