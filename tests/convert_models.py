"""Small ONNX models for the converter's tests, and the check that every conversion must pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from openwork.convert.job import Options, convert, decompress
from openwork.convert.report import Report
from weights24 import random_24

COMPRESSED = {"Conv2DCompress", "MatMulV2Compress", "FullyConnectionCompress", "Conv2DTransposeDCompress"}


def finite_24(rng, shape, axis, dtype=np.float32, *, blocks=1, zero_point=0, minus=False):
    """A 2:4 weight without NaN and Inf, with negative zeros only if `minus`."""
    weight = random_24(rng, shape, axis, blocks, dtype, zero_point)
    if np.dtype(dtype).kind in "iu" or "int4" in np.dtype(dtype).name:
        return weight
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = weight.astype(np.float64)
    wide[~np.isfinite(wide)] = 1.5
    return (wide if minus else wide + 0.0).astype(dtype)


def initializer(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def info(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def model_of(nodes, inputs, outputs, initializers=(), *, opset=17, ir=8, functions=(), imports=()):
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), list(initializers))
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset), *imports],
        ir_version=ir,
        functions=list(functions),
    )
    model.producer_name = "a test"
    entry = model.metadata_props.add()
    entry.key, entry.value = "kept", "as it is"
    return model


def session(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def all_ops(model):
    """Operator types anywhere in the model, its own compressed functions not counted."""
    found = []

    def walk(nodes):
        for node in nodes:
            found.append(node.op_type)
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    walk(attribute.g.node)

    walk(model.graph.node)
    for function in model.functions:
        if function.domain != "openwork":
            walk(function.node)
    return found


def convert_and_check(
    model, folder: Path, feeds, *, run=True, name="model", **options
) -> tuple[Report, onnx.ModelProto]:
    """Convert; the result must pass the checker, run bit-equal, and give the original file back byte for byte."""
    source = folder / f"{name}.onnx"
    source.write_bytes(model.SerializeToString())
    before = source.read_bytes()
    report = convert(Options(str(source), str(folder / f"{name}_out"), sparsity=1, **options))
    assert source.read_bytes() == before
    target = folder / f"{name}_out.onnx"
    converted = onnx.load(target)
    onnx.checker.check_model(str(target))
    if run:
        for feed in feeds if isinstance(feeds, list) else [feeds]:
            first = session(source).run(None, feed)
            second = session(target).run(None, feed)
            assert [a.tobytes() for a in first] == [b.tobytes() for b in second]
            assert [a.dtype for a in first] == [b.dtype for b in second]
    if any(layer.qualifies for layer in report.layers):
        back = folder / f"{name}_back.onnx"
        decompress(str(target), str(back))
        assert back.read_bytes() == before
    else:
        assert target.read_bytes() == before
    return report, converted
