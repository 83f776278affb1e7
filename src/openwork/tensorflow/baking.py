"""Frozen graphs with openwork's operators: what they make of the weights is computed and written into the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from openwork.errors import FileError, ModelError
from openwork.tensorflow.graphs import const_node, first_line, node_name, subgraph, tensor_of
from openwork.tensorflow.helpers import without_helpers
from openwork.tensorflow.inserted.channels import ALIVE
from openwork.tensorflow.names import COMPONENT, is_helper, seen_through

__all__ = ["Baked", "bake", "without_idle_functions"]


@dataclass(frozen=True, eq=False)
class Baked:
    """A frozen graph without openwork's operators.

    Attributes:
        graph_def: the graph; masked weights hold exact zeros, fake-quantised ones the values they stand for.
        alive: units in force by group scope (``channels/...``): bool, one for each unit.
        masks: N:M masks in force by layer, of the weights' shapes.
        ranges: what else was asked for, by name below the component.
        bits: of the integers that each quantised layer's weights stand for.
    """

    graph_def: tf.compat.v1.GraphDef
    alive: dict[str, np.ndarray] = field(default_factory=dict)
    masks: dict[str, np.ndarray] = field(default_factory=dict)
    ranges: dict[str, np.ndarray] = field(default_factory=dict)
    bits: dict[str, int] = field(default_factory=dict)


def _below(name: str) -> str:
    """The part of a helper's name below the component."""
    parts = name.split("/")
    return "/".join(parts[parts.index(COMPONENT) + 1 :])


def bake(graph_def: tf.compat.v1.GraphDef, outputs: Sequence[str], also: Sequence[str] = ()) -> Baked:
    """Write what openwork's operators make of weights into the weights, and take the operators out.

    Operators on activations (fake quantisation) are taken out as well.

    Args:
        graph_def: a frozen graph; not changed.
        outputs: its outputs; what they do not need is left alone.
        also: last parts of names of further helpers whose values are wanted.

    Raises:
        FileError: a helper depends on what the file does not hold.
        ModelError: TensorFlow cannot compute the helpers.
    """
    nodes = {node.name: node for node in graph_def.node}
    needed = subgraph(graph_def, outputs)
    helpers = [name for name in needed if is_helper(name)]
    if not helpers:
        return Baked(without_helpers(graph_def))
    first = {n.name: next((i for i in n.input if not i.startswith("^")), "") for n in graph_def.node if n.input}
    fixed = _fixed(nodes, needed)
    stands: dict[str, str] = {}  # helper tensor -> constant that it stands for
    for name in needed:
        if is_helper(name):
            continue
        for tensor in nodes[name].input:
            if is_helper(tensor) and not tensor.startswith("^") and node_name(tensor) in fixed:
                stands[tensor] = _constant(nodes, seen_through(tensor, first))
    alive = {_below(name).rpartition("/")[0]: name for name in helpers if name.endswith(f"/{ALIVE}")}
    masks = {
        _below(name).removeprefix("patterns/").rpartition("/")[0]: nodes[name].input[1]
        for name in helpers
        if _below(name).startswith("patterns/") and name.endswith("/masked")
    }
    further = {_below(name): name for name in helpers if name.rpartition("/")[2] in also and name in fixed}
    wanted = [*stands, *alive.values(), *masks.values(), *further.values()]
    values = dict(zip(wanted, _computed(graph_def, wanted), strict=True))
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(graph_def)
    written = {node.name: node for node in result.node}
    for tensor, constant in stands.items():
        written[constant].CopyFrom(const_node(constant, values[tensor]))
    return Baked(
        without_helpers(result),
        {scope: values[name] > 0.5 for scope, name in alive.items()},
        {layer: values[tensor] > 0.5 for layer, tensor in masks.items()},
        {name: values[tensor] for name, tensor in further.items()},
        {
            _below(name).removeprefix("quantised/").partition("/weight/")[0]: int(nodes[name].attr["num_bits"].i)
            for name in helpers
            if "/weight/" in _below(name) and nodes[name].op.startswith("FakeQuant")
        },
    )


def _fixed(nodes: dict[str, Any], needed: set[str]) -> set[str]:
    """Nodes that depend on constants alone."""
    fixed: dict[str, bool] = {}
    for start in needed:
        stack = [start]
        while stack:
            name = stack[-1]
            if name in fixed:
                stack.pop()
                continue
            node = nodes[name]
            inputs = [node_name(i) for i in node.input if not i.startswith("^")]
            left = [i for i in inputs if i not in fixed]
            if left and node.op not in ("NextIteration",):
                stack += left
                continue
            stack.pop()
            fixed[name] = node.op == "Const" or (bool(inputs) and all(fixed.get(i, False) for i in inputs))
    return {name for name, constant in fixed.items() if constant}


def _constant(nodes: dict[str, Any], tensor: str) -> str:
    """The constant that a weight is read from."""
    name = tensor_of(tensor)[0]
    while nodes[name].op == "Identity":
        name = node_name(nodes[name].input[0])
    if nodes[name].op != "Const":
        raise FileError(f"weight {name!r} is a {nodes[name].op}; freeze the graph so that it is a constant")
    return name


def _computed(graph_def: tf.compat.v1.GraphDef, tensors: Sequence[str]) -> list[np.ndarray]:
    part = tf.compat.v1.GraphDef(versions=graph_def.versions)
    part.library.CopyFrom(graph_def.library)
    needed = subgraph(graph_def, tensors)
    part.node.extend(node for node in graph_def.node if node.name in needed)
    with tf.Graph().as_default() as graph:
        try:
            tf.import_graph_def(part, name="")
            with tf.compat.v1.Session(graph=graph) as session:
                return list(session.run(["{}:{}".format(*tensor_of(name)) for name in tensors]))
        except (ValueError, TypeError, KeyError, tf.errors.OpError) as error:
            raise ModelError(f"the masks in the graph cannot be computed: {first_line(error)}") from error


def without_idle_functions(graph_def: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """Drop, in place, functions that no operator calls any more."""
    bodies = {function.signature.name: function for function in graph_def.library.function}
    called: set[str] = set()
    pending = list(graph_def.node)
    while pending:
        node = pending.pop()
        names = {node.op}
        for value in node.attr.values():
            names.add(value.func.name)
            names.update(item.name for item in value.list.func)
        for name in (names & set(bodies)) - called:
            called.add(name)
            pending += bodies[name].node_def
    kept = [bodies[name] for name in bodies if name in called]
    gradients = [item for item in graph_def.library.gradient if item.function_name in called]
    del graph_def.library.function[:], graph_def.library.gradient[:]
    graph_def.library.function.extend(kept)
    graph_def.library.gradient.extend(gradients)
    return graph_def
