"""Small valid models with every kind of layer, for fuzzing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from convert_models import finite_24, info, initializer, model_of
from openwork.convert.job import Options, convert


def seed_models(folder: Path) -> list[bytes]:
    """Bytes of models; external data and compressed twins are made in `folder`."""
    rng = np.random.default_rng(5)
    models = [_plain(rng, 17, 8), _plain(rng, 9, 3), _integer(rng), _bodies(rng), _function(rng)]
    seeds = [model.SerializeToString() for model in models]
    path = folder / "seed.onnx"
    for place, data in enumerate(list(seeds)):
        path.write_bytes(data)
        convert(Options(str(path), str(folder / "twin"), sparsity=1))
        if place in (0, 2, 3, 4):
            seeds.append((folder / "twin.onnx").read_bytes())
    onnx.save(models[0], path, save_as_external_data=True, location="seed.bin", size_threshold=0)
    seeds.append(path.read_bytes())
    for name in ("seed.onnx", "twin.onnx", "twin.json"):
        (folder / name).unlink()
    return seeds


def _plain(rng, opset, ir):
    inits = [
        initializer("c", finite_24(rng, (8, 8, 3, 3), 1, minus=True)),
        initializer("t", finite_24(rng, (8, 4, 2, 2), 0, blocks=2)),
        initializer("m", finite_24(rng, (8, 12), 0)),
        initializer("g", finite_24(rng, (12, 12), 1)),
        initializer("shape", np.array([8, 12], np.int64)),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "c"], ["y1"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("ConvTranspose", ["y1", "t"], ["y2"], group=2),
        helper.make_node("Reshape", ["m", "shape"], ["m2"]),
        helper.make_node("MatMul", ["v", "m2"], ["y3"]),
        helper.make_node("Gemm", ["y3", "g"], ["y4"], transB=1),
    ]
    inputs = [info("x", ["n", 8, 5, 5]), info("v", [2, 8])]
    if ir < 4:
        inputs += [info(tensor.name, list(tensor.dims), tensor.data_type) for tensor in inits]
    return model_of(nodes, inputs, [info("y2", ["n", 8, 6, 6]), info("y4", [2, 12])], inits, opset=opset, ir=ir)


def _integer(rng):
    inits = [
        initializer("w", finite_24(rng, (16, 8), 0, np.int8)),
        initializer("u", finite_24(rng, (16, 8), 0, np.uint8, zero_point=6)),
        *(initializer("uz", np.uint8(6)), initializer("s", np.float32(0.5)), initializer("z", np.int8(0))),
    ]
    nodes = [
        helper.make_node("MatMulInteger", ["x", "u", "", "uz"], ["a"]),
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"]),
        helper.make_node("Transpose", ["d"], ["dt"], perm=[1, 0]),
        helper.make_node("Gemm", ["f", "dt"], ["b"], transB=1),
    ]
    return model_of(
        nodes,
        [info("x", [2, 16], TensorProto.UINT8), info("f", [2, 16])],
        [info("a", [2, 8], TensorProto.INT32), info("b", [2, 8])],
        inits,
    )


def _bodies(rng):
    then_branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "inner"], ["a"])],
        *("then", [], [info("a", [2, 8])]),
        [initializer("inner", finite_24(rng, (16, 8), 0))],
    )
    else_branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "outer"], ["b"])], *("else", [], [info("b", [2, 8])])
    )
    return model_of(
        [helper.make_node("If", ["c"], ["y"], then_branch=then_branch, else_branch=else_branch)],
        [info("x", [2, 16]), info("c", [], TensorProto.BOOL)],
        [info("y", [2, 8])],
        [initializer("outer", finite_24(rng, (16, 8), 0))],
    )


def _function(rng):
    value = numpy_helper.from_array(finite_24(rng, (16, 8), 0), "value")
    function = helper.make_function(
        *("mine", "Block", ["a"], ["b"]),
        [helper.make_node("Constant", [], ["k"], value=value), helper.make_node("MatMul", ["a", "k"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    handed = helper.make_function(
        *("mine", "Handed", ["a", "w"], ["b"]),
        [helper.make_node("Gemm", ["a", "w"], ["b"], transB=1)],
        [helper.make_opsetid("", 17)],
    )
    nodes = [
        helper.make_node("Block", ["x"], ["y"], domain="mine"),
        helper.make_node("Handed", ["x", "w1"], ["z"], domain="mine"),
        helper.make_node("Handed", ["x", "w2"], ["u"], domain="mine"),
    ]
    return model_of(
        nodes,
        [info("x", [2, 16])],
        [info("y", [2, 8]), info("z", [2, 6]), info("u", [2, 6])],
        [initializer(name, finite_24(rng, (6, 16), 1, minus=name == "w2")) for name in ("w1", "w2")],
        functions=[function, handed],
        imports=[helper.make_opsetid("mine", 1)],
    )
