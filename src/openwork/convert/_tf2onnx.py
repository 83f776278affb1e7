"""Run as a program: ``python -m openwork.convert._tf2onnx MODEL OUTPUT OPSET INPUT_SHAPES OUT_NODES``."""

from __future__ import annotations

import os
import sys
from typing import Any

from openwork.convert._integers import integer_weights, restore_integers
from openwork.convert._operators import add_operators, refuse_foreign
from openwork.convert.shapes import parse_input_shape
from openwork.errors import ConfigError, OpenworkError, nearest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _with_port(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _saved_model(path: str, output: str, opset: int) -> None:
    import tensorflow as tf
    import tf2onnx
    from tf2onnx import tf_loader

    graph, inputs, outputs = tf_loader.from_saved_model(path, None, None)
    del tf
    tf2onnx.convert._convert_common(
        graph,
        name="model",
        opset=opset,
        input_names=list(inputs),
        output_names=list(outputs),
        output_path=output,
    )


def _frozen(path: str, output: str, opset: int, shapes: dict[str, list[int]], out_nodes: str) -> None:
    import tensorflow as tf
    import tf2onnx

    graph = tf.compat.v1.GraphDef()
    with open(path, "rb") as stream:
        graph.ParseFromString(stream.read())
    if not graph.node:
        raise ValueError("the graph has no nodes")
    read = {name.lstrip("^").split(":")[0] for node in graph.node for name in node.input}
    outputs = [_with_port(name) for name in out_nodes.split(";") if name] or [
        f"{node.name}:0"
        for node in graph.node
        if node.name not in read and node.op not in ("Const", "NoOp", "Placeholder")
    ]
    inputs = [f"{node.name}:0" for node in graph.node if node.op == "Placeholder"]
    _refuse_unknown("--input_shape", [_with_port(name) for name in shapes], inputs)
    _refuse_unknown("--out_nodes", [name.split(":")[0] for name in outputs], [node.name for node in graph.node])
    override: dict[str, Any] = {_with_port(name): sizes for name, sizes in shapes.items()}
    integers = integer_weights(graph)
    model, external = tf2onnx.convert.from_graph_def(
        graph,
        input_names=inputs,
        output_names=outputs,
        opset=opset,
        shape_override=override or None,
        output_path=output,
    )
    if integers and not external and restore_integers(model, integers):
        with open(output, "wb") as stream:
            stream.write(model.SerializeToString())


def _refuse_unknown(option: str, names: list[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{option}: the graph has no {name!r}; {nearest(name, known)}")


def main(arguments: list[str]) -> None:
    """Convert; any error ends the program with its message on the last line of stderr."""
    path, output, opset, shapes, out_nodes = arguments
    add_operators()
    if os.path.isdir(path):
        _saved_model(path, output, int(opset))
    else:
        _frozen(path, output, int(opset), parse_input_shape(shapes) if shapes else {}, out_nodes)
    refuse_foreign(output)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        kind = "" if isinstance(error, OpenworkError) else f"{type(error).__name__}: "
        print(" ".join(f"{kind}{error}".split()), file=sys.stderr)
        sys.exit(1)
