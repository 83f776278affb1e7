"""Weights in bodies of If, Loop and Scan, in local functions, in external files, shared, overridable."""

from __future__ import annotations

import json
import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from convert_models import all_ops, convert_and_check, finite_24, info, initializer, model_of, session
from openwork.convert.job import Options, convert, decompress, inspect
from openwork.errors import ConversionError, FileError


@pytest.fixture
def rng():
    return np.random.default_rng(23)


def test_bodies_of_if(tmp_path, rng):
    """One branch has a weight of its own, the other reads one from around it (and through a Transpose there)."""
    outer, inner = finite_24(rng, (6, 24), 1), finite_24(rng, (24, 6), 0)
    then_branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "inner"], ["a"], name="inside")],
        *("then", [], [info("a", [2, 6])]),
        [initializer("inner", inner)],
    )
    else_branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "outer_t"], ["b"], name="captured")],
        *("else", [], [info("b", [2, 6])]),
    )
    nodes = [
        helper.make_node("Transpose", ["outer"], ["outer_t"]),
        helper.make_node("If", ["c"], ["y"], then_branch=then_branch, else_branch=else_branch),
    ]
    model = model_of(
        nodes,
        [info("x", [2, 24]), info("c", [], TensorProto.BOOL)],
        [info("y", [2, 6])],
        [initializer("outer", outer)],
    )
    x = rng.standard_normal((2, 24)).astype(np.float32)
    feeds = [{"x": x, "c": np.array(flag)} for flag in (True, False)]
    report, converted = convert_and_check(model, tmp_path, feeds)
    assert [layer.qualifies for layer in report.layers] == [True, True]
    assert sorted(all_ops(converted)) == ["If", "MatMulV2Compress", "MatMulV2Compress"]
    assert "then_branch of If" in " ".join(layer.where for layer in report.layers)


def test_bodies_of_loop_and_scan(tmp_path, rng):
    weight, scanned = finite_24(rng, (12, 12), 0), finite_24(rng, (12, 4), 0)
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state", "w"], ["next"]),
            helper.make_node("Identity", ["go"], ["on"]),
        ],
        "body",
        [info("i", [], TensorProto.INT64), info("go", [], TensorProto.BOOL), info("state", [2, 12])],
        [info("on", [], TensorProto.BOOL), info("next", [2, 12])],
        [initializer("w", weight)],
    )
    step = helper.make_graph(
        [
            helper.make_node("Constant", [], ["v"], value=numpy_helper.from_array(scanned)),
            helper.make_node("MatMul", ["row", "v"], ["part"]),
        ],
        "step",
        [info("row", [12])],
        [info("part", [4])],
    )
    nodes = [
        helper.make_node("Loop", ["n", "", "x"], ["z"], body=body),
        helper.make_node("Scan", ["z"], ["y"], body=step, num_scan_inputs=1),
    ]
    model = model_of(nodes, [info("x", [2, 12])], [info("y", [2, 4])], [initializer("n", np.array(3, np.int64))])
    report, converted = convert_and_check(model, tmp_path, {"x": rng.standard_normal((2, 12)).astype(np.float32)})
    assert [layer.qualifies for layer in report.layers] == [True, True]
    assert all_ops(converted).count("MatMulV2Compress") == 2


def test_local_functions(tmp_path, rng):
    """A constant inside a function is compressed; a weight handed to a function is an input there."""
    inner = numpy_helper.from_array(finite_24(rng, (24, 8), 0, minus=True), "value")
    own = helper.make_function(
        *("mine", "Block", ["a"], ["c"]),
        [
            helper.make_node("Constant", [], ["k"], value=inner),
            helper.make_node("MatMul", ["a", "k"], ["b"], name="in function"),
            helper.make_node("Relu", ["b"], ["c"]),
        ],
        [helper.make_opsetid("", 17)],
    )
    given = helper.make_function(
        *("mine", "Given", ["a", "w"], ["b"]),
        [helper.make_node("MatMul", ["a", "w"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    conv = helper.make_function(
        *("mine", "ConvBlock", ["a", "w"], ["b"]),
        [helper.make_node("Conv", ["a", "w"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    nodes = [
        helper.make_node("Block", ["x"], ["h"], domain="mine"),
        helper.make_node("Block", ["x2"], ["h2"], domain="mine"),
        helper.make_node("Add", ["h", "h2"], ["s"]),
        helper.make_node("Given", ["s", "w"], ["y"], domain="mine"),
    ]
    model = model_of(
        nodes,
        [info("x", [2, 24]), info("x2", [2, 24])],
        [info("y", [2, 6])],
        [initializer("w", finite_24(rng, (8, 6), 0))],
        functions=[own, given, conv],
        imports=[helper.make_opsetid("mine", 1)],
    )
    feeds = {name: rng.standard_normal((2, 24)).astype(np.float32) for name in ("x", "x2")}
    report, converted = convert_and_check(model, tmp_path, feeds)
    assert [layer.qualifies for layer in report.layers] == [True, True, False]
    assert [layer.weight for layer in report.layers] == ["k", "w", None]
    assert "is an input of the function" in report.layers[2].reason  # which nobody calls
    assert "MatMulV2Compress" in [node.op_type for node in converted.functions[0].node]
    assert list(converted.functions[1].input) == ["a", "w.values_2", "w.index_2"]


def test_kinds_of_one_operator_inside_and_outside_of_functions(tmp_path, rng):
    """Inside functions onnxruntime looks functions up by name alone, whatever their overload."""
    value = [numpy_helper.from_array(finite_24(rng, (24, 24), 0, minus=minus)) for minus in (False, True)]
    inner = [
        helper.make_node("Constant", [], ["k0"], value=value[0]),
        helper.make_node("Constant", [], ["k1"], value=value[1]),
        helper.make_node("MatMul", ["a", "k0"], ["b0"]),
        helper.make_node("MatMul", ["b0", "k1"], ["b1"]),
        helper.make_node("Relu", ["b1"], ["b"]),
    ]
    function = helper.make_function("mine", "F", ["a"], ["b"], inner, [helper.make_opsetid("", 17)])
    inits = [initializer(f"w{i}", finite_24(rng, (24, 24), i % 2, minus=i > 1)) for i in range(4)]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["y0"]),
        helper.make_node("MatMul", ["w1", "y0"], ["y1"]),
        helper.make_node("MatMul", ["y1", "w2"], ["y2"]),
        helper.make_node("MatMul", ["w3", "y2"], ["y3"]),
        helper.make_node("F", ["y3"], ["y"], domain="mine"),
    ]
    model = model_of(
        nodes,
        [info("x", [24, 24])],
        [info("y", [24, 24])],
        inits,
        functions=[function],
        imports=[helper.make_opsetid("mine", 1)],
    )
    report, converted = convert_and_check(model, tmp_path, {"x": rng.standard_normal((24, 24)).astype(np.float32)})
    assert [layer.qualifies for layer in report.layers] == [True] * 6
    assert len({(f.name, f.overload) for f in converted.functions if f.domain == "openwork"}) == 5


def handing_model(rng, weights, extra=(), inner=None):
    """y0 = F(x, w0, v), y1 = F(x, w1, v), ...: F(a, p, q) = Gemm(a, p) @ Transpose(q)."""
    inner = inner or [
        helper.make_node("Gemm", ["a", "p"], ["h"], transB=1),
        helper.make_node("Transpose", ["q"], ["qt"], perm=[1, 0]),
        helper.make_node("MatMul", ["h", "qt"], ["b"], name="second"),
    ]
    function = helper.make_function("mine", "F", ["a", "p", "q"], ["b"], inner, [helper.make_opsetid("", 17)])
    inits = [initializer(f"w{place}", weight) for place, weight in enumerate(weights)]
    inits.append(initializer("v", finite_24(rng, (8, 16), 1)))
    nodes = [
        helper.make_node("F", ["x", f"w{place}", "v"], [f"y{place}"], domain="mine", name=f"call {place}")
        for place in range(len(weights))
    ]
    outputs = [info(f"y{place}", [2, None]) for place in range(len(weights))]
    return model_of(
        [*nodes, *extra],
        [info("x", [2, 24])],
        outputs,
        inits,
        functions=[function],
        imports=[helper.make_opsetid("mine", 1)],
    )


def test_weights_handed_to_local_functions(tmp_path, rng):
    """Two calls with weights of their own, one of them with signs of zeros, and one that both share."""
    weights = [finite_24(rng, (16, 24), 1, minus=minus) for minus in (False, True)]
    feed = {"x": rng.standard_normal((2, 24)).astype(np.float32)}
    report, converted = convert_and_check(handing_model(rng, weights), tmp_path, feed)
    assert [(layer.weight, layer.qualifies) for layer in report.layers] == [
        *(("w0", True), ("w1", True), ("v", True), ("v", True))
    ]
    names = [tensor.name for tensor in converted.graph.initializer]
    assert names == [
        *("w0.values", "w0.index", "w0.negative_zeros", "w1.values", "w1.index", "w1.negative_zeros"),
        *("v.values", "v.index"),
    ]
    assert list(converted.graph.node[0].input) == ["x", *names[:3], *names[6:]]
    assert all_ops(converted).count("Transpose") == 0


@pytest.mark.parametrize("case", ["one is dense", "other shapes", "read outside", "one is computed"])
def test_functions_whose_calls_differ_stay_dense(tmp_path, rng, case):
    weights = [finite_24(rng, (16, 24), 1) for _ in range(2)]
    extra = []
    if case == "one is dense":
        weights[1][:] = 1
        words = "shared: another call of the function (F 'call 1') needs it dense: not 2:4"
    elif case == "other shapes":
        model = handing_model(rng, weights)
        weights[1] = weights[1][:, :].astype(np.float32).reshape(16, 24)[:16].repeat(1, 0)
        words = "hand over weights of different shapes"
        inner = [helper.make_node("MatMul", ["p", "a"], ["b"])]
        weights[1] = finite_24(rng, (5, 24), 1)
    elif case == "read outside":
        extra = [helper.make_node("Relu", ["w0"], ["r"], name="outside")]
        words = "shared: 'w0' is also read by Relu 'outside'"
    else:
        words = "shared: another call of the function needs it dense"
    if case == "other shapes":
        model = handing_model(rng, weights, inner=inner)
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 24
        del model.graph.output[:]
        model.graph.output.extend([info("y0", [16, 24]), info("y1", [5, 24])])
        feed = {"x": rng.standard_normal((24, 24)).astype(np.float32)}
    else:
        model = handing_model(rng, weights, extra)
        feed = {"x": rng.standard_normal((2, 24)).astype(np.float32)}
    if case == "one is computed":
        model.graph.node.insert(0, helper.make_node("Relu", ["w1"], ["made"]))
        model.graph.node[2].input[1] = "made"
    report, _ = convert_and_check(model, tmp_path, feed)
    first = next(layer for layer in report.layers if layer.weight == "w0")
    assert words in first.reason
    assert {layer.qualifies for layer in report.layers if layer.weight == "v"} <= {True}


def test_a_weight_used_twice_is_stored_once(tmp_path, rng):
    weight = finite_24(rng, (16, 16), 0)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="one"),
        helper.make_node("MatMul", ["a", "w"], ["b"], name="two"),
        helper.make_node("Gemm", ["b", "w"], ["y"], name="three"),
    ]
    model = model_of(nodes, [info("x", [2, 16])], [info("y", [2, 16])], [initializer("w", weight)])
    report, converted = convert_and_check(model, tmp_path, {"x": rng.standard_normal((2, 16)).astype(np.float32)})
    assert all(layer.qualifies for layer in report.layers)
    assert [tensor.name for tensor in converted.graph.initializer] == ["w.values", "w.index"]
    assert report.layers[0].shared_with == ["two", "three"]


@pytest.mark.parametrize("case", ["gather", "other axis", "graph output", "behind a node"])
def test_a_weight_that_is_needed_dense_stays_dense(tmp_path, rng, case):
    weight = finite_24(rng, (16, 16), 0)
    weight[finite_24(rng, (16, 16), 1) == 0] = 0  # 2:4 along both axes
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="head")]
    outputs, expected = [info("y", [2, 16])], ""
    if case == "gather":
        nodes.append(helper.make_node("Gather", ["w", "i"], ["e"], name="embedding"))
        outputs.append(info("e", [1, 16]))
        expected = "shared: 'w' is also read by Gather 'embedding'"
    elif case == "other axis":
        nodes.append(helper.make_node("Gemm", ["x", "w"], ["e"], name="turned", transB=1))
        outputs.append(info("e", [2, 16]))
        expected = "packed along different axes"
    elif case == "graph output":
        outputs.append(info("w", [16, 16]))
        expected = "shared: 'w' is also an output of the graph"
    else:
        nodes = [
            helper.make_node("Identity", ["w"], ["w2"]),
            helper.make_node("MatMul", ["x", "w2"], ["y"], name="head"),
            helper.make_node("Relu", ["w2"], ["e"], name="other"),
        ]
        outputs.append(info("e", [16, 16]))
        expected = "shared: 'w2' is also read by Relu 'other'"
    model = model_of(
        nodes,
        [info("x", [2, 16])],
        outputs,
        [initializer("w", weight), initializer("i", np.array([3], np.int64))],
    )
    report, _ = convert_and_check(model, tmp_path, {"x": rng.standard_normal((2, 16)).astype(np.float32)})
    assert not any(layer.qualifies for layer in report.layers)
    assert expected in report.layers[0].reason


def test_reasons_for_staying_dense(tmp_path, rng):
    bad = finite_24(rng, (24, 8), 0)
    bad[8:11, 5] = 1
    inits = [
        initializer("bad", bad),
        initializer("depthwise", finite_24(rng, (6, 1, 3, 3), 0)),
        initializer("tiny", np.zeros((2, 5), np.float32)),
        initializer("three", np.zeros((8, 3, 3, 3), np.float32)),
        initializer("default", finite_24(rng, (24, 8), 0)),
        initializer("shifted", finite_24(rng, (24, 8), 0, np.int8, zero_point=3)),
        initializer("shift", np.int8(3)),
        initializer("channels", finite_24(rng, (24, 8), 0, np.uint8, zero_point=3)),
        initializer("each", np.arange(8, dtype=np.uint8)),
        *(initializer("empty", np.zeros((0, 8), np.float32)), initializer("pads", np.array([0, 0, 0, 0], np.int64))),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "bad"], ["y0"], name="bad"),
        helper.make_node("Conv", ["i", "depthwise"], ["y1"], name="depthwise", group=6),
        helper.make_node("MatMul", ["t", "tiny"], ["y2"], name="tiny"),
        helper.make_node("Conv", ["rgb", "three"], ["y3"], name="three"),
        helper.make_node("MatMul", ["x", "default"], ["y4"], name="default"),
        helper.make_node("MatMul", ["x", "xt"], ["y5"], name="two activations"),
        helper.make_node("MatMulInteger", ["v", "shifted", "", "shift"], ["y6"], name="shifted"),
        helper.make_node("MatMulInteger", ["v", "channels", "", "each"], ["y7"], name="per channel"),
        helper.make_node("Pad", ["default", "pads"], ["padded"]),
        helper.make_node("MatMul", ["x", "padded"], ["y8"], name="computed"),
    ]
    inputs = [
        *(info("x", [2, 24]), info("i", [1, 6, 5, 5]), info("t", [3, 2]), info("rgb", [1, 3, 5, 5])),
        *(info("xt", [24, 3]), info("default", [24, 8]), info("v", [2, 24], TensorProto.UINT8)),
    ]
    outputs = [info(f"y{n}", None, TensorProto.INT32 if n in (6, 7) else TensorProto.FLOAT) for n in range(9)]
    model = model_of(nodes, inputs, outputs, inits)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    reasons = {layer.name: layer.reason for layer in inspect(str(path)).layers}
    assert reasons["bad"] == "not 2:4: 1 of 48 groups have more than two non-zeros, the first at [8, 5]"
    assert reasons["depthwise"].startswith("depthwise")
    assert reasons["tiny"] == "too small: 2 input channels"
    assert reasons["three"].startswith("too small: 3 input channels take")
    assert reasons["default"] == "dynamic weight: 'default' is also an input of the graph, so it may be overridden"
    assert reasons["two activations"] == "dynamic weight: 'xt' is an input of the graph"
    assert reasons["shifted"] == "zero-point: it is 3; a signed weight needs 0"
    assert reasons["per channel"].startswith("zero-point: it differs between channels (0 to 7)")
    assert reasons["computed"] == "dynamic weight: no operand is a stored constant"


def external_model(rng, folder, location="data.bin", save=True):
    weight = finite_24(rng, (64, 48), 0, minus=True)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("MatMul", ["a", "v"], ["y"])]
    model = model_of(
        nodes,
        [info("x", [2, 64])],
        [info("y", [2, 5])],
        [initializer("w", weight), initializer("v", rng.standard_normal((48, 5)).astype(np.float32))],
    )
    path = folder / "ext.onnx"
    if save:
        onnx.save(model, path, save_as_external_data=True, location=location, size_threshold=0)
    return path, model


def test_external_data_is_read_and_written(tmp_path, rng):
    source = tmp_path / "in"
    (source / "sub").mkdir(parents=True)
    path, _ = external_model(rng, source, "sub/data.bin")
    before = {p: p.read_bytes() for p in (path, source / "sub" / "data.bin")}
    report = convert(Options(str(path), str(tmp_path / "out"), sparsity=1))
    assert [layer.qualifies for layer in report.layers] == [True, False]
    assert {p: p.read_bytes() for p in before} == before
    names = sorted(os.listdir(tmp_path))
    assert names == ["in", "out.json", "out.onnx", "out.onnx.data"]
    raw = onnx.load(tmp_path / "out.onnx", load_external_data=False)
    assert {t.data_location for t in raw.graph.initializer} == {TensorProto.EXTERNAL}
    assert os.path.getsize(tmp_path / "out.onnx.data") < os.path.getsize(source / "sub" / "data.bin")
    onnx.checker.check_model(str(tmp_path / "out.onnx"))
    feed = {"x": rng.standard_normal((2, 64)).astype(np.float32)}
    first, second = session(path).run(None, feed)[0], session(tmp_path / "out.onnx").run(None, feed)[0]
    assert first.tobytes() == second.tobytes()
    decompress(str(tmp_path / "out.onnx"), str(tmp_path / "back.onnx"))
    assert onnx.load(tmp_path / "back.onnx").SerializeToString() == onnx.load(path).SerializeToString()


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("../secret.bin", "leaves the model's folder; allowed: a relative path"),
        ("sub/../../secret.bin", "leaves the model's folder"),
        ("/etc/hostname", "leaves the model's folder"),
        ("C:\\secret.bin", "leaves the model's folder"),
        ("..\\secret.bin", "leaves the model's folder"),
        ("link.bin", "leaves the model's folder by a link"),
        ("sub/secret.bin", "leaves the model's folder by a link"),
        ("missing.bin", "does not exist"),
        ("", "without a location"),
        ("here", "is not a regular file"),
    ],
)
def test_external_data_that_is_missing_or_escapes(tmp_path, rng, location, words):
    folder = tmp_path / "model"
    outside = tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(100_000))
    (outside / "secret.bin").write_bytes(bytes(100_000))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "sub").symlink_to(outside)
    (folder / "here").mkdir()
    _, model = external_model(rng, folder, save=False)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises((ConversionError, FileError), match=words):
        convert(Options(str(path), str(tmp_path / "out"), sparsity=1))
    assert sorted(os.listdir(tmp_path)) == ["model", "outside", "secret.bin"]


@pytest.mark.parametrize(
    ("key", "value"), [("offset", "-8"), ("length", "99999999"), ("offset", "x"), ("length", "-1")]
)
def test_external_data_out_of_range(tmp_path, rng, key, value):
    path, _ = external_model(rng, tmp_path)
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == key:
            entry.value = value
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ConversionError, match="external data"):
        inspect(str(path))


def test_emitted_arrays_decode_to_the_weights(tmp_path, rng):
    from safetensors.numpy import load_file

    from openwork.sparsity.nvidia import from_nvidia
    from openwork.sparsity.pack24 import unpack24

    conv, mm = finite_24(rng, (8, 12, 3, 3), 1), finite_24(rng, (24, 8), 0, np.int8)
    nodes = [
        helper.make_node("Conv", ["x", "conv"], ["a"]),
        helper.make_node("MatMulInteger", ["v", "mm"], ["b"]),
    ]
    model = model_of(
        nodes,
        [info("x", [1, 12, 5, 5]), info("v", [2, 24], TensorProto.INT8)],
        [info("a", [1, 8, 3, 3]), info("b", [2, 8], TensorProto.INT32)],
        [initializer("conv", conv), initializer("mm", mm)],
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    for emit in ("nvidia", "ascend"):
        for container in ("npz", "safetensors"):
            stem = tmp_path / f"{emit}_{container}"
            convert(Options(str(path), str(stem), sparsity=1, emit=emit, container=container))
            file = f"{stem}.{container}"
            if container == "npz":
                with np.load(file, allow_pickle=False) as archive:
                    arrays = dict(archive)
            else:
                arrays = load_file(file)
            for name, weight, axis in (("conv", conv, 1), ("mm", mm, 0)):
                values, cin = arrays[f"{name}/values"], weight.shape[axis]
                if emit == "nvidia":
                    back = unpack24(from_nvidia(values, arrays[f"{name}/metadata"], cin, axis))
                else:
                    assert arrays[f"{name}/index"].dtype == np.int8
                    back = unpack24(values, arrays[f"{name}/index"], cin, axis)
                assert (back == weight).all()
            report = json.loads((tmp_path / f"{emit}_{container}.json").read_text())
            assert report["summary"]["qualifying"] == 2
    convert(Options(str(path), str(tmp_path / "dense"), sparsity=1, emit="dense"))
    assert (tmp_path / "dense.onnx").read_bytes() == path.read_bytes()


def test_converting_a_compressed_model_again(tmp_path, rng):
    model = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [info("x", [2, 24])],
        [info("y", [2, 8])],
        [initializer("w", finite_24(rng, (24, 8), 0))],
    )
    convert_and_check(model, tmp_path, {"x": np.ones((2, 24), np.float32)})
    once = tmp_path / "model_out.onnx"
    convert(Options(str(once), str(tmp_path / "again"), sparsity=1))
    assert (tmp_path / "again.onnx").read_bytes() == once.read_bytes()
    convert(Options(str(once), str(tmp_path / "off"), sparsity=0))
    assert (tmp_path / "off.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()
