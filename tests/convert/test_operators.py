"""Every operator, type, opset and way to a weight: bit-equal in onnxruntime, byte-equal after decompress."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from convert_models import all_ops, convert_and_check, finite_24, info, initializer, model_of

OPSETS = [(7, 3), (8, 3), (9, 4), (10, 5), (11, 6), (12, 7), (13, 7), (15, 8), (17, 8), (19, 9), (21, 10), (23, 11)]


@pytest.fixture
def rng():
    return np.random.default_rng(17)


@pytest.mark.parametrize(("opset", "ir"), OPSETS)
@pytest.mark.parametrize("minus", [False, True])
def test_all_four_operators_at_every_opset(tmp_path, rng, opset, ir, minus):
    weights = {
        "conv": finite_24(rng, (16, 20, 3, 3), 1, minus=minus),
        "transposed": finite_24(rng, (16, 5, 2, 2), 0, blocks=2, minus=minus),
        "matmul": finite_24(rng, (16, 7), 0, minus=minus),
        "gemm": finite_24(rng, (9, 16), 1, minus=minus),
    }
    inits = [initializer(name, weight) for name, weight in weights.items()]
    inits += [initializer("bias", np.arange(16, dtype=np.float32)), initializer("b", np.ones(9, np.float32))]
    nodes = [
        helper.make_node("Conv", ["x", "conv", "bias"], ["c"], name="a conv", pads=[1, 1, 1, 1], strides=[2, 1]),
        helper.make_node("ConvTranspose", ["c", "transposed"], ["t"], name="up", group=2, strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "matmul"], ["m"], name="mm"),
        helper.make_node("Gemm", ["f", "gemm", "b"], ["g"], name="fc", transB=1, alpha=0.5),
    ]
    inputs = [info("x", ["batch", 20, 6, "width"])]
    if ir < 4:
        inputs += [info(tensor.name, list(tensor.dims)) for tensor in inits]
    outputs = [info("t", None), info("m", ["batch", 7]), info("g", ["batch", 9])]
    outputs[0] = info("t", ["batch", 10, None, None])
    model = model_of(nodes, inputs, outputs, inits, opset=opset, ir=ir)
    x = rng.standard_normal((2, 20, 6, 5)).astype(np.float32)
    report, converted = convert_and_check(model, tmp_path, {"x": x})
    assert [layer.compressed_operator for layer in report.layers] == [
        *("Conv2DCompress", "Conv2DTransposeDCompress", "MatMulV2Compress", "FullyConnectionCompress")
    ]
    assert all(layer.negative_zeros == minus for layer in report.layers)
    new = [node for node in converted.graph.node if node.domain == "openwork"]
    assert [node.name for node in new] == ["a conv", "up", "mm", "fc"]
    assert all(helper.get_node_attr_value(node, "alg") == b"weight_sparse_4_2" for node in new)
    assert helper.get_node_attr_value(new[0], "strides") == [2, 1]
    assert [entry.value for entry in converted.metadata_props if entry.key == "kept"] == ["as it is"]
    assert converted.producer_name == "a test"
    assert [d.dim_param or d.dim_value for d in converted.graph.input[0].type.tensor_type.shape.dim] == [
        *("batch", 20, 6, "width")
    ]
    assert [entry.name for entry in converted.graph.input] == ["x"]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_of_all_ranks_and_groups(tmp_path, rng, dims, groups):
    weight = finite_24(rng, (6, 13, *[3] * dims), 1)
    model = model_of(
        [helper.make_node("Conv", ["x", "w"], ["y"], group=groups, pads=[2] * 2 * dims, dilations=[2] * dims)],
        [info("x", ["n", 13 * groups, *[7] * dims])],
        [info("y", ["n", 6, *[7] * dims])],
        [initializer("w", weight)],
    )
    x = rng.standard_normal((1, 13 * groups, *[7] * dims)).astype(np.float32)
    report, converted = convert_and_check(model, tmp_path, {"x": x})
    assert report.layers[0].qualifies
    assert all_ops(converted) == ["Conv2DCompress"]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 3])
def test_transposed_convolutions(tmp_path, rng, dims, groups):
    # 15 channels in 3 groups: groups of four start anew at 5 and 10.
    weight = finite_24(rng, (15, 4, *[2] * dims), 0, blocks=groups)
    model = model_of(
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], group=groups)],
        [info("x", ["n", 15, *[5] * dims])],
        [info("y", ["n", 4 * groups, *[6] * dims])],
        [initializer("w", weight)],
    )
    x = rng.standard_normal((2, 15, *[5] * dims)).astype(np.float32)
    report, _ = convert_and_check(model, tmp_path, {"x": x})
    assert report.layers[0].qualifies
    assert report.layers[0].axis == 0


MATMULS = [
    (["x", "w"], (24, 5), 0, (3, 24), (3, 5)),
    (["x", "w"], (2, 24, 5), 1, (2, 3, 24), (2, 3, 5)),
    (["x", "w"], (3, 1, 24, 5), 2, (2, 3, 24), (3, 2, 3, 5)),
    (["w", "x"], (5, 24), 1, (24, 3), (5, 3)),
    (["w", "x"], (4, 5, 24), 2, (4, 24, 3), (4, 5, 3)),
    (["x", "w"], (24,), 0, (3, 24), (3,)),
    (["w", "x"], (24,), 0, (24, 3), (3,)),
]


@pytest.mark.parametrize(("names", "shape", "axis", "x_shape", "y_shape"), MATMULS)
def test_matmul_with_either_operand_constant(tmp_path, rng, names, shape, axis, x_shape, y_shape):
    model = model_of(
        [helper.make_node("MatMul", names, ["y"], name="m")],
        [info("x", x_shape)],
        [info("y", y_shape)],
        [initializer("w", finite_24(rng, shape, axis))],
    )
    x = rng.standard_normal(x_shape).astype(np.float32)
    report, converted = convert_and_check(model, tmp_path, {"x": x})
    assert (report.layers[0].qualifies, report.layers[0].axis) == (True, axis)
    assert all_ops(converted) == ["MatMulV2Compress"]


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("left", [False, True])
def test_gemm(tmp_path, rng, trans_a, trans_b, left):
    shape_a, shape_b = ((24, 3) if trans_a else (3, 24)), ((5, 24) if trans_b else (24, 5))
    axis = (0 if trans_a else 1) if left else (1 if trans_b else 0)
    weight = finite_24(rng, shape_a if left else shape_b, axis)
    x_shape = shape_b if left else shape_a
    model = model_of(
        [helper.make_node("Gemm", ["w", "x"] if left else ["x", "w"], ["y"], transA=trans_a, transB=trans_b)],
        [info("x", x_shape)],
        [info("y", [3, 5])],
        [initializer("w", weight)],
    )
    report, _ = convert_and_check(model, tmp_path, {"x": rng.standard_normal(x_shape).astype(np.float32)})
    assert (report.layers[0].qualifies, report.layers[0].axis) == (True, axis)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32, np.uint32, np.int64])
def test_matmul_types(tmp_path, rng, dtype):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [info("x", [3, 24], kind)],
        [info("y", [3, 5], kind)],
        [initializer("w", finite_24(rng, (24, 5), 0, dtype))],
    )
    x = rng.integers(0, 9, (3, 24)).astype(dtype)
    report, _ = convert_and_check(model, tmp_path, {"x": x})
    assert report.layers[0].qualifies


def test_bfloat16_behind_a_cast(tmp_path, rng):
    model = model_of(
        [
            helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["x", "wide"], ["y"]),
        ],
        [info("x", [3, 24])],
        [info("y", [3, 5])],
        [initializer("w", finite_24(rng, (24, 5), 0, ml_dtypes.bfloat16, minus=True))],
    )
    report, converted = convert_and_check(model, tmp_path, {"x": rng.standard_normal((3, 24)).astype(np.float32)})
    assert report.layers[0].type == "bfloat16"
    assert all_ops(converted) == ["MatMulV2Compress"]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("opset", [10, 13, 17])
def test_integer_operators(tmp_path, rng, dtype, opset):
    zero = 0 if dtype == np.int8 else 128
    kind = TensorProto.UINT8
    conv = finite_24(rng, (8, 12, 3, 3), 1, dtype, zero_point=zero)
    matmul = finite_24(rng, (40, 18), 0, dtype, zero_point=zero)
    inits = [
        initializer("conv", conv),
        initializer("conv2", conv.copy()[::-1].copy()),
        initializer("mm", matmul),
        initializer("mm2", matmul[:, ::-1].copy()),
        initializer("wz", np.array(zero, dtype)),
        initializer("ws", np.float32(0.1)),
        initializer("xs", np.float32(0.2)),
        initializer("xz", np.uint8(3)),
        initializer("ys", np.float32(0.4)),
        initializer("yz", np.uint8(7)),
        initializer("bias", np.arange(8, dtype=np.int32)),
    ]
    scaled = ["xs", "xz", "conv", "ws", "wz", "ys", "yz"]
    nodes = [
        helper.make_node("QLinearConv", ["x", *scaled, "bias"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("ConvInteger", ["x", "conv2", "xz", "wz"], ["b"]),
        helper.make_node("QLinearMatMul", ["v", "xs", "xz", "mm", "ws", "wz", "ys", "yz"], ["c"]),
        helper.make_node("MatMulInteger", ["v", "mm2", "xz", "wz"], ["d"]),
    ]
    model = model_of(
        nodes,
        [info("x", [1, 12, 6, 6], kind), info("v", [2, 40], kind)],
        [
            *(info("a", [1, 8, 6, 6], kind), info("b", [1, 8, 4, 4], TensorProto.INT32)),
            *(info("c", [2, 18], kind), info("d", [2, 18], TensorProto.INT32)),
        ],
        inits,
        opset=opset,
        ir=7,
    )
    feeds = {
        "x": rng.integers(0, 255, (1, 12, 6, 6)).astype(np.uint8),
        "v": rng.integers(0, 255, (2, 40)).astype(np.uint8),
    }
    report, converted = convert_and_check(model, tmp_path, feeds)
    assert [layer.reason for layer in report.layers] == [None] * 4
    assert sorted(all_ops(converted)) == ["Conv2DCompress"] * 2 + ["MatMulV2Compress"] * 2
    if opset >= 12:
        assert {f.overload for f in converted.functions} == {"", "v2"}
    ratio = report.layers[0].bytes_after / report.layers[0].bytes_before
    if opset >= 12:
        assert ratio == pytest.approx((16 / 2 + 2) / 12)  # 12 channels are padded to 16


def test_left_operand_of_integer_matmuls(tmp_path, rng):
    weight = finite_24(rng, (6, 12), 1, np.int8)
    model = model_of(
        [
            helper.make_node("MatMulInteger", ["w", "v", "", "xz"], ["d"]),
            helper.make_node("QLinearMatMul", ["w", "ws", "wz", "u", "xs", "wz", "ys", "wz"], ["c"]),
        ],
        [info("v", [12, 3], TensorProto.UINT8), info("u", [12, 3], TensorProto.INT8)],
        [info("d", [6, 3], TensorProto.INT32), info("c", [6, 3], TensorProto.INT8)],
        [
            *(initializer("w", weight), initializer("xz", np.uint8(3)), initializer("wz", np.int8(0))),
            *(initializer("ws", np.float32(0.1)), initializer("xs", np.float32(0.2))),
            initializer("ys", np.float32(0.3)),
        ],
    )
    feeds = {
        "v": rng.integers(0, 255, (12, 3)).astype(np.uint8),
        "u": rng.integers(-99, 99, (12, 3)).astype(np.int8),
    }
    report, converted = convert_and_check(model, tmp_path, feeds)
    assert [layer.qualifies for layer in report.layers] == [True, True]
    assert report.layers[0].shared_with
    assert len([t for t in converted.graph.initializer if t.name.endswith(".values")]) == 1


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize("per_channel", [False, True])
def test_quantised_by_qdq(tmp_path, rng, dtype, per_channel):
    """QDQ around Conv, Gemm and MatMul; onnxruntime fuses both files to the same integer operators."""
    unsigned = np.dtype(dtype).name.startswith("u")
    zero = 6 if unsigned else 0
    four_bits = "int4" in np.dtype(dtype).name
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    conv = finite_24(rng, (8, 16, 3, 3), 1, dtype, zero_point=zero)
    fc = finite_24(rng, (8, 6), 0, dtype, zero_point=zero)
    scale = (np.arange(8, dtype=np.float32) + 1) / 50
    per = {"axis": 0} if per_channel else {}
    inits = [
        *(initializer("conv", conv), initializer("fc", fc)),
        initializer("conv_s", scale if per_channel else np.float32(0.1)),
        initializer("conv_z", np.full(8, zero).astype(dtype) if per_channel else np.array(zero).astype(dtype)),
        initializer("fc_s", np.float32(0.1)),
        initializer("fc_z", np.array(zero).astype(dtype)),
        *(initializer("s", np.float32(0.05)), initializer("z", np.uint8(128))),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["conv", "conv_s", "conv_z"], ["conv_d"], **per),
        helper.make_node("Conv", ["d", "conv_d"], ["c"]),
        helper.make_node("QuantizeLinear", ["c", "s", "z"], ["cq"]),
        helper.make_node("DequantizeLinear", ["cq", "s", "z"], ["cd"]),
        helper.make_node("GlobalAveragePool", ["cd"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("DequantizeLinear", ["fc", "fc_s", "fc_z"], ["fc_d"]),
        helper.make_node("MatMul", ["f", "fc_d"], ["y"]),
    ]
    model = model_of(
        nodes,
        [info("x", ["n", 16, 6, 6])],
        [info("y", ["n", 6])],
        inits,
        opset=21 if four_bits else 17,
        ir=10 if four_bits else 8,
    )
    assert kind
    x = rng.standard_normal((2, 16, 6, 6)).astype(np.float32)
    report, converted = convert_and_check(model, tmp_path, {"x": x})
    assert report.layers[0].reason is None
    # 8 channels of 4 bits: 2 bytes of values and 1 of index for 4 bytes.
    assert report.layers[1].qualifies
    assert all_ops(converted).count("DequantizeLinear") == 2
    assert report.layers[0].bytes_after / report.layers[0].bytes_before == (0.75 if four_bits else 0.625)


def test_float_weight_behind_q_and_dq(tmp_path, rng):
    """Fake quantisation: the float weight is stored, quantised and dequantised in the graph."""
    inits = [
        initializer("w", finite_24(rng, (8, 16, 3, 3), 1, minus=True)),
        *(initializer("s", np.float32(0.05)), initializer("z", np.int8(0))),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Conv", ["x", "d"], ["y"]),
    ]
    model = model_of(nodes, [info("x", [1, 16, 5, 5])], [info("y", [1, 8, 3, 3])], inits)
    report, converted = convert_and_check(model, tmp_path, {"x": rng.standard_normal((1, 16, 5, 5)).astype(np.float32)})
    assert report.layers[0].qualifies
    assert all_ops(converted) == ["Conv2DCompress"]


def test_constant_nodes_and_typed_fields(tmp_path, rng):
    """Weights in Constant nodes, and tensors stored in float_data and int32_data instead of raw bytes."""
    first, second = finite_24(rng, (24, 8), 0, minus=True), finite_24(rng, (8, 6), 0)
    third = finite_24(rng, (16, 6), 0, np.int8)
    plain = helper.make_tensor("second", TensorProto.FLOAT, second.shape, second.reshape(-1).tolist())
    assert plain.float_data
    half = helper.make_tensor("half", TensorProto.FLOAT16, (6, 5), finite_24(rng, (6, 5), 0, np.float16).reshape(-1))
    ints = TensorProto(name="third", data_type=TensorProto.INT8, dims=third.shape)
    ints.int32_data.extend(third.reshape(-1).tolist())
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Constant", [], ["first"], value=numpy_helper.from_array(first, "inner name")),
        helper.make_node("Identity", ["first"], ["again"]),
        helper.make_node("MatMul", ["r", "again"], ["a"]),
        helper.make_node("MatMul", ["a", "second"], ["b"]),
        helper.make_node("MatMulInteger", ["v", "third"], ["c"]),
    ]
    model = model_of(
        nodes,
        [info("x", [2, 24]), info("v", [2, 16], TensorProto.INT8)],
        [info("b", [2, 6]), info("c", [2, 6], TensorProto.INT32)],
        [plain, half, ints],
    )
    feeds = {
        "x": rng.standard_normal((2, 24)).astype(np.float32),
        "v": rng.integers(-9, 9, (2, 16)).astype(np.int8),
    }
    report, converted = convert_and_check(model, tmp_path, feeds)
    assert [layer.qualifies for layer in report.layers] == [True, True, True]
    assert all_ops(converted) == ["Relu", "MatMulV2Compress", "MatMulV2Compress", "MatMulV2Compress"]


CHAINS = {
    "transpose": ([("Transpose", {"perm": [1, 0]})], (6, 24), 1),
    "transpose without perm": ([("Transpose", {})], (6, 24), 1),
    "identities": ([("Identity", {}), ("Identity", {})], (24, 6), 0),
    "flattened": ([("Reshape", [24, 6])], (144,), None),
    "reshape that keeps the axis": ([("Reshape", [24, -1])], (24, 2, 3), 0),
    "reshape that splits the axis": ([("Reshape", [0, 6])], (24, 3, 2), 0),
    "reshape, transpose, reshape": (
        [("Reshape", [2, 3, 24]), ("Transpose", {"perm": [2, 0, 1]}), ("Reshape", [24, 6])],
        (6, 24),
        1,
    ),
    "unsqueeze and squeeze": ([("Unsqueeze", [0]), ("Squeeze", [0])], (24, 6), 0),
    "cast": ([("Cast", {"to": TensorProto.FLOAT})], (24, 6), 0),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("opset", [9, 13, 17])
def test_weights_behind_nodes(tmp_path, rng, chain, opset):
    steps, shape, axis = CHAINS[chain]
    dtype = np.float16 if chain == "cast" else np.float32
    weight = finite_24(rng, (24, 6), 0, dtype).reshape(shape) if axis is None else finite_24(rng, shape, axis, dtype)
    nodes, inits, name = [], [initializer("w", weight)], "w"
    for place, (kind, value) in enumerate(steps):
        attributes = value if isinstance(value, dict) else {}
        inputs = [name]
        if kind == "Reshape" or (isinstance(value, list) and opset >= 13):
            inits.append(initializer(f"k{place}", np.array(value, np.int64)))
            inputs.append(f"k{place}")
        elif isinstance(value, list):
            attributes = {"axes": value}
        name = f"s{place}"
        nodes.append(helper.make_node(kind, inputs, [name], **attributes))
    nodes.append(helper.make_node("MatMul", ["x", name], ["y"]))
    model = model_of(nodes, [info("x", [3, 24])], [info("y", [3, 6])], inits, opset=opset, ir=7)
    x = rng.standard_normal((3, 24)).astype(np.float32)
    report, converted = convert_and_check(model, tmp_path, {"x": x})
    assert report.layers[0].reason is None
    assert all_ops(converted) == ["MatMulV2Compress"]


def test_reshape_that_mixes_the_channels_stays_dense(tmp_path, rng):
    weight = finite_24(rng, (4, 36), 1)
    model = model_of(
        [
            helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
            helper.make_node("Reshape", ["t", "shape"], ["r"]),
            helper.make_node("MatMul", ["x", "r"], ["y"]),
        ],
        [info("x", [3, 24])],
        [info("y", [3, 6])],
        [initializer("w", weight), initializer("shape", np.array([24, 6], np.int64))],
    )
    report, _ = convert_and_check(model, tmp_path, {"x": np.ones((3, 24), np.float32)})
    assert "cuts through the input channels" in report.layers[0].reason
