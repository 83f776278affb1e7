"""The functions that stand for compressed operators, run by onnx.reference: no runtime's own tricks involved."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from convert_models import finite_24, info, initializer, model_of
from openwork.convert.job import Options, convert
from openwork.onnx.functions import COMPRESSED, DOMAIN, Layout, Library, StepCopy


def reference(path, feed):
    return ReferenceEvaluator(onnx.load(path)).run(None, feed)


# Below opset 10 Slice takes its ends as an attribute, which onnx.reference cannot hand through a function.
@pytest.mark.parametrize("opset", [10, 11, 12, 13, 17, 21])
@pytest.mark.parametrize("minus", [False, True])
def test_the_reference_runs_it(tmp_path, opset, minus):
    rng = np.random.default_rng(opset)
    nodes = [
        helper.make_node("Conv", ["x", "c"], ["h"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("GlobalAveragePool", ["h"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "m"], ["a"]),
        helper.make_node("Gemm", ["f", "g", "b"], ["y"], transB=1, beta=2.0),
    ]
    inits = [
        initializer("c", finite_24(rng, (16, 20, 3, 3), 1, minus=minus)),
        initializer("m", finite_24(rng, (16, 6), 0, minus=minus)),
        initializer("g", finite_24(rng, (5, 16), 1, minus=minus)),
        initializer("b", rng.standard_normal(5).astype(np.float32)),
    ]
    inputs, outputs = [info("x", [1, 20, 6, 6])], [info("a", [1, 6]), info("y", [1, 5])]
    path = tmp_path / "m.onnx"
    path.write_bytes(model_of(nodes, inputs, outputs, inits, opset=opset).SerializeToString())
    report = convert(Options(str(path), str(tmp_path / "o"), sparsity=1))
    assert report.qualifying == 3
    onnx.checker.check_model(onnx.load(tmp_path / "o.onnx"), full_check=True)
    feed = {"x": rng.standard_normal((1, 20, 6, 6)).astype(np.float32)}
    for first, second in zip(reference(path, feed), reference(tmp_path / "o.onnx", feed), strict=True):
        # The weights' order in memory differs, and with it NumPy's order of summing up.
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.int4])
def test_the_reference_runs_quantised_layers(tmp_path, dtype):
    rng = np.random.default_rng(4)
    zero = 5 if dtype == np.uint8 else 0
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"]),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    inits = [
        initializer("w", finite_24(rng, (24, 6), 0, dtype, zero_point=zero)),
        *(initializer("s", np.float32(0.25)), initializer("z", np.array(zero).astype(dtype))),
    ]
    path = tmp_path / "m.onnx"
    model = model_of(nodes, [info("x", [2, 24])], [info("y", [2, 6])], inits, opset=21, ir=10)
    path.write_bytes(model.SerializeToString())
    assert convert(Options(str(path), str(tmp_path / "o"), sparsity=1)).qualifying == 1
    feed = {"x": rng.standard_normal((2, 24)).astype(np.float32)}
    for first, second in zip(reference(path, feed), reference(tmp_path / "o.onnx", feed), strict=True):
        assert first.tobytes() == second.tobytes()


def a_layout(**changes):
    return Layout(**{"data_type": TensorProto.FLOAT, "dims": (6, 24), "view": (6, 24), "axis": 1, **changes})


def test_one_function_serves_layers_that_differ_in_attributes_only():
    library = Library()
    one = helper.make_node("Conv", ["x", "w"], ["y"], strides=[1, 1], pads=[0, 0, 0, 0])
    two = helper.make_node("Conv", ["x", "v"], ["z"], pads=[1, 1, 1, 1], strides=[2, 2])
    wide = {"dims": (8, 16, 3, 3), "view": (8, 16, 3, 3)}
    wider = {"dims": (4, 64, 5, 5), "view": (4, 64, 5, 5)}
    first = library.call(one, 1, a_layout(**wide), ("v1", "i1"), [], 17)
    second = library.call(two, 1, a_layout(**wider), ("v2", "i2"), [], 17)
    assert len(library.functions) == 1
    assert not library.overloaded
    assert (first.domain, first.op_type, list(first.input)) == (DOMAIN, "Conv2DCompress", ["x", "v1", "i1"])
    assert helper.get_node_attr_value(second, "moved_shape") == [4, 5, 5, 64]
    assert helper.get_node_attr_value(second, "strides") == [2, 2]


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        ("bias", {"node": helper.make_node("Conv", ["x", "w", "b"], ["y"])}),
        ("attribute", {"node": helper.make_node("Conv", ["x", "w"], ["y"], group=1)}),
        ("signs", {"layout": a_layout(signs=True)}),
        ("zero-point", {"layout": a_layout(data_type=TensorProto.UINT8, zero_point=3)}),
        ("type", {"layout": a_layout(data_type=TensorProto.FLOAT16)}),
        ("axis", {"layout": a_layout(axis=0, view=(24, 6), dims=(24, 6))}),
        ("ragged", {"layout": a_layout(dims=(6, 21), view=(6, 21))}),
        ("step", {"steps": [StepCopy(helper.make_node("Identity", ["w"], ["i"]), ())]}),
        ("opset", {"opset": 11}),
    ],
)
def test_layers_of_another_kind_get_a_function_of_their_own(change, arguments):
    library = Library()
    plain = {"node": helper.make_node("Conv", ["x", "w"], ["y"]), "layout": a_layout(), "steps": [], "opset": 17}
    calls = []
    for what in (plain, {**plain, **arguments}, plain):
        parts = ("v", "i", "n") if what["layout"].signs else ("v", "i")
        calls.append(library.call(what["node"], 1, what["layout"], parts, what["steps"], what["opset"]))
    assert [call.overload for call in calls] == ["", "v2", ""], change
    assert [function.overload for function in library.functions] == ["", "v2"]
    assert library.overloaded


def test_functions_of_the_model_keep_their_names():
    there = helper.make_function(DOMAIN, "Conv2DCompress", [], [], [], [])
    library = Library([there])
    call = library.call(helper.make_node("Conv", ["x", "w"], ["y"]), 1, a_layout(), ("v", "i"), [], 17)
    assert call.overload == "v2"


def test_every_operator_has_a_twin():
    assert set(COMPRESSED.values()) == {
        *("Conv2DCompress", "Conv2DTransposeDCompress", "FullyConnectionCompress", "MatMulV2Compress")
    }


def test_a_corrupt_index_is_an_error_when_the_model_is_loaded(tmp_path):
    import onnxruntime

    path = tmp_path / "m.onnx"
    weight = finite_24(np.random.default_rng(0), (6, 24), 1)
    model = model_of(
        [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)],
        [info("x", [1, 24])],
        [info("y", [1, 6])],
        [initializer("w", weight)],
    )
    path.write_bytes(model.SerializeToString())
    convert(Options(str(path), str(tmp_path / "o"), sparsity=1))
    broken = onnx.load(tmp_path / "o.onnx")
    index = next(tensor for tensor in broken.graph.initializer if tensor.name == "w.index")
    index.raw_data = b"\xff" + index.raw_data[1:]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match=r"GatherElements|out of bounds|index"):
        onnxruntime.InferenceSession(broken.SerializeToString(), options).run(None, {"x": np.ones((1, 24), np.float32)})
