"""Values that a graph computes from constants and shapes: TensorFlow computes them, in one session."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from openwork.tensorflow.graphs import Bound, const_node, node_name, subgraph, tensor_of

__all__ = ["constant_of", "known_values"]

_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
_NEVER = {"Placeholder", "PlaceholderWithDefault", "PlaceholderV2", "Switch", "Merge", "Enter", "Exit", "NextIteration",
          "LoopCond", "RefSwitch", "RefMerge", "If", "While", "StatelessIf", "StatelessWhile", "PartitionedCall",
          "StatefulPartitionedCall", "Case", "StatelessCase"}  # fmt: skip


def constant_of(node: Any) -> np.ndarray:
    """The value of a Const node."""
    return tf.make_ndarray(node.attr["value"].tensor)


Shapes = Callable[[str], tuple[int, ...] | None]


def known_values(bound: Bound, wanted: Iterable[str], shape: Shapes | None = None) -> dict[str, np.ndarray]:
    """Values of tensors that depend on constants and shapes alone.

    Args:
        bound: the graph.
        wanted: tensors, ``node:index``.
        shape: shape of a tensor, if not that of `bound` (after a removal, say).

    Returns:
        The values by tensor; those that depend on data, variables or chance are missing.
    """
    shape = bound.shape if shape is None else shape
    nodes = {node.name: node for node in bound.order}
    fixed: dict[str, bool] = {}
    for node in bound.order:
        inputs = [i for i in node.input if not i.startswith("^")]
        if node.op == "Const":
            fixed[node.name] = True
        elif node.op in _SHAPES:
            fixed[node.name] = all(shape(i) is not None for i in inputs)
        elif node.op in _NEVER or not inputs:
            fixed[node.name] = False
        else:
            definition = op_def_registry.get(node.op)
            stateless = definition is not None and not definition.is_stateful
            fixed[node.name] = stateless and all(fixed.get(node_name(i), False) for i in inputs)
    known: dict[str, np.ndarray] = {}
    computed: list[str] = []
    for tensor in dict.fromkeys(wanted):
        node = nodes.get(node_name(tensor))
        if node is None or not fixed[node.name]:
            continue
        if node.op == "Const":
            known[tensor] = constant_of(node)
        elif node.op in _SHAPES:
            known[tensor] = _shape_value(shape, node, tensor_of(tensor)[1])
        else:
            computed.append(tensor)
    if computed:
        known.update(_compute(bound, nodes, computed, shape))
    return known


def _shape_value(shapes: Shapes, node: Any, index: int) -> np.ndarray:
    shape = shapes("{}:{}".format(*tensor_of(node.input[index if node.op == "ShapeN" else 0]))) or ()
    kind = node.attr["out_type"].type
    dtype = tf.as_dtype(kind).as_numpy_dtype if kind else np.int32
    value = {"Size": int(np.prod(shape)), "Rank": len(shape)}.get(node.op, list(shape))
    return np.asarray(value, dtype=dtype)


def _compute(bound: Bound, nodes: dict[str, Any], computed: list[str], shape: Shapes) -> dict[str, np.ndarray]:
    """Run the part of the graph that has to be computed, with shapes put in as constants."""
    stops = {name for name, node in nodes.items() if node.op in _SHAPES}
    part = tf.compat.v1.GraphDef(versions=bound.graph_def.versions)
    part.library.CopyFrom(bound.graph_def.library)
    cut = tf.compat.v1.GraphDef()
    for name, node in nodes.items():
        copied = cut.node.add()
        copied.CopyFrom(node)
        if name in stops:
            del copied.input[:]
    replaced: dict[str, str] = {}
    for name in subgraph(cut, computed, control=False):
        node = nodes[name]
        if name not in stops:
            copied = part.node.add()
            copied.CopyFrom(node)
            del copied.input[:]
            copied.input.extend(i for i in node.input if not i.startswith("^"))
            continue
        for index in range(len([i for i in node.input if not i.startswith("^")]) if node.op == "ShapeN" else 1):
            made = f"{name}/known_{index}"
            part.node.append(const_node(made, _shape_value(shape, node, index)))
            replaced[f"{name}:{index}"] = made
    for node in part.node:
        for place, tensor in enumerate(node.input):
            name, index = tensor_of(tensor)
            node.input[place] = replaced.get(f"{name}:{index}", tensor)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(part, name="")
        with tf.compat.v1.Session(graph=graph) as session:
            found = session.run([graph.get_tensor_by_name("{}:{}".format(*tensor_of(t))) for t in computed])
    return dict(zip(computed, found, strict=True))
