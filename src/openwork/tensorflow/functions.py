"""Graphs without calls: the bodies of functions take the place of the operators that call them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph_def

from openwork.tensorflow.graphs import tensor_of

__all__ = ["inlined"]

_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_DEPTH = 64  # a function that calls itself is left as it is


def inlined(graph_def: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """The graph with calls of functions replaced by the functions' operators; itself if it has no calls.

    Operators of a body are named ``<caller>/<name>``; an operator with the caller's name gives its first result, so
    that outputs keep their names. Conditionals and loops stay as they are.
    """
    for _ in range(_DEPTH):
        bodies = {function.signature.name: function for function in graph_def.library.function}
        if not any(node.op in _CALLS and node.attr["f"].func.name in bodies for node in graph_def.node):
            break
        graph_def = _one_level(graph_def, bodies)
    return graph_def


def _one_level(graph_def: tf.compat.v1.GraphDef, bodies: dict[str, Any]) -> tf.compat.v1.GraphDef:
    result = tf.compat.v1.GraphDef(versions=graph_def.versions)
    result.library.CopyFrom(graph_def.library)
    results: dict[str, str] = {}  # result of a call -> tensor of the body
    for node in graph_def.node:
        function = bodies.get(node.attr["f"].func.name) if node.op in _CALLS else None
        if function is None:
            result.node.add().CopyFrom(node)
        else:
            _inline(result, node, function, results)
    for node in result.node:
        for place, name in enumerate(node.input):
            if not name.startswith("^"):
                plain = "{}:{}".format(*tensor_of(name))
                seen = set()
                while plain in results and plain not in seen and node.name != plain.partition(":")[0]:
                    seen.add(plain)
                    plain = results[plain]
                    node.input[place] = plain
    return result


def _inline(result: Any, call: Any, function: Any, results: dict[str, str]) -> None:
    body, flat = function_def_to_graph_def(function)
    given = [name for name in call.input if not name.startswith("^")]
    control = [name for name in call.input if name.startswith("^")]
    arguments = dict(zip((argument.name for argument in function.signature.input_arg), given, strict=True))

    def renamed(name: str) -> str:
        mark = "^" if name.startswith("^") else ""
        node, index = tensor_of(name.removeprefix("^"))
        if node in arguments:
            outside = arguments[node]
            return f"^{tensor_of(outside)[0]}" if mark else outside
        return f"{mark}{call.name}/{node}" if mark else f"{call.name}/{node}:{index}"

    for node in body.node:
        if node.name in arguments:
            continue
        copied = result.node.add()
        copied.CopyFrom(node)
        copied.name = f"{call.name}/{node.name}"
        del copied.input[:]
        data = [renamed(name) for name in node.input if not name.startswith("^")]
        held = [renamed(name) for name in node.input if name.startswith("^")]
        copied.input.extend([*data, *held, *control])
    made = [renamed(flat[function.ret[argument.name]]) for argument in function.signature.output_arg]
    held = [renamed(f"^{name}") for name in function.control_ret.values()]
    for index, tensor in enumerate(made):
        results[f"{call.name}:{index}"] = tensor
    types = [item.type for item in function.signature.output_arg]
    standing = result.node.add(name=call.name, op="IdentityN" if len(made) > 1 else "Identity" if made else "NoOp")
    standing.input.extend([*made, *(held or ([] if made else control))])
    if len(made) > 1:
        standing.attr["T"].list.type.extend(types)
    elif made:
        standing.attr["T"].type = types[0]
