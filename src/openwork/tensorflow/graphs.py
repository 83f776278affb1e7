"""Graphs as data: reading frozen files, names, what an output needs, in which order, of which shape."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from openwork.errors import ConfigError, FileError, ModelError, kind_of, nearest
from openwork.files import path_text, read_bytes

__all__ = [
    "BATCH",
    "ENTERS",
    "FIX_LENGTHS",
    "Bound",
    "as_graph_def",
    "bind",
    "const_node",
    "first_line",
    "made_up",
    "node_name",
    "output_names",
    "read_frozen",
    "subgraph",
    "tensor_of",
    "topological",
]

FIX_LENGTHS = "fix the lengths of its placeholders, in the graph or with sizes= of analyze_graph and prune_graph"
"""What helps where a length that the graph leaves open is needed."""

# Stands for an unknown batch length: a prime, so that no product of channel counts is equal to it.
BATCH = 1009
# Stand for other unknown lengths, axis by axis: distinct, and divisible by the strides of usual networks.
_SPACE = (352, 416, 544, 608)
_HEADLINE = "Graph execution error:"  # TensorFlow says what is wrong in the lines below it
_CALLING = re.compile(r"Exception encountered when calling (.+?)\.?$")  # so does Keras
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_GRADIENTS = re.compile(r"gradients(_\d+)?")  # the scope that tf.gradients opens
_UPDATE = re.compile(r"(Resource)?(Sparse)?Apply[A-Z]")  # of an optimizer
_LIMIT = 1 << 31  # protobuf's own limit of one message

VARIABLES = {"VariableV2", "Variable", "VarHandleOp", "AutoReloadVariable"}
ENTERS = ("Enter", "RefEnter")  # what a loop (tf.while_loop without control flow v2) reads from outside comes by these


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, after the layer at work where Keras names it."""
    lines = [line for line in (_STYLE.sub("", line).strip() for line in str(error).splitlines()) if line]
    lines = [line for line in lines if line != _HEADLINE]
    if lines and lines[0].startswith("Detected at node"):
        # A stack of Python lines stands before the reason.
        node = next((place for place, line in enumerate(lines) if line.startswith("Node:")), 0)
        lines = lines[node + 1 :] or lines
    calling = _CALLING.match(lines[0]) if len(lines) > 1 else None
    text = f"{calling[1]}: {lines[1]}" if calling else lines[0] if lines else type(error).__name__
    return text[:300]


def node_name(tensor: str) -> str:
    """``^name``, ``name:1`` -> ``name``."""
    return tensor.removeprefix("^").partition(":")[0]


def tensor_of(name: str) -> tuple[str, int]:
    """``name:1`` -> (``name``, 1)."""
    node, _, index = name.partition(":")
    return node, int(index or 0)


def as_graph_def(graph: Any, what: str = "graph") -> tf.compat.v1.GraphDef:
    """The GraphDef of a tf.Graph, or the one given.

    Args:
        graph: what the caller gave.
        what: the argument that it was given for, for messages.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(graph, tf.compat.v1.GraphDef):
        return graph
    if isinstance(graph, tf.Graph):
        return graph.as_graph_def(add_shapes=False)
    raise ConfigError(f"{what} is {kind_of(graph)}; a tf.Graph or a GraphDef is needed")


def read_frozen(path: str | os.PathLike[str]) -> tf.compat.v1.GraphDef:
    """A frozen graph from a .pb file.

    Raises:
        FileError: missing, a folder, no GraphDef, or not frozen (a variable is in it).
    """
    name = path_text(path, "pb_model")
    if Path(name).is_dir():
        raise FileError(f"pb_model {name} is a folder; the file of a frozen graph (.pb) is needed")
    content = read_bytes(name, "pb_model", limit=_LIMIT)
    graph_def = tf.compat.v1.GraphDef()
    try:
        graph_def.ParseFromString(content)
    except DecodeError as error:
        raise FileError(f"pb_model {name} is no frozen graph, or it is truncated ({len(content)} bytes)") from error
    if not graph_def.node:
        raise FileError(f"pb_model {name} has no nodes; a frozen graph (.pb) is needed")
    variable = next((node.name for node in graph_def.node if node.op in VARIABLES), None)
    if variable is not None:
        raise FileError(
            f"pb_model {name} is not frozen: {variable!r} is a variable; freeze it first, "
            "e.g. with tf.compat.v1.graph_util.convert_variables_to_constants"
        )
    return graph_def


def output_names(graph_def: tf.compat.v1.GraphDef, outputs: Any) -> list[str]:
    """Output tensors as ``node:index``, after a check that they are in the graph.

    Raises:
        ConfigError: no outputs, not text, or not in the graph.
    """
    if isinstance(outputs, str):
        outputs = [outputs]
    given = list(outputs) if isinstance(outputs, Iterable) else []
    if not given:
        raise ConfigError(f"outputs is {outputs!r}; a list of names of operators or tensors is needed")
    names = {node.name for node in graph_def.node}
    found = []
    for item in given:
        name = item if isinstance(item, str) else getattr(item, "name", None)
        if not isinstance(name, str):
            raise ConfigError(f"outputs: {item!r} is no name of an operator or tensor")
        node, colon, index = name.partition(":")
        if colon and not index.isdigit():
            raise ConfigError(f"outputs: {name!r} is no name of a tensor; allowed: 'name' or 'name:0'")
        if node not in names:
            raise ConfigError(f"outputs: {node!r} is not in the graph; {nearest(node, _forward(graph_def))}")
        found.append(f"{node}:{index or 0}")
    return list(dict.fromkeys(found))


def _forward(graph_def: tf.compat.v1.GraphDef) -> set[str]:
    """Names of the operators that may be outputs: what brings weights and what gradients and optimizers add is none."""
    state = VARIABLES | {"Const", "NoOp", "ReadVariableOp", "RestoreV2", "SaveV2"}
    # Below a variable stand its initial value and its reads, below an optimizer what it counts.
    scopes = {node.name for node in graph_def.node if node.op in VARIABLES}
    scopes |= {node.name.partition("/update_")[0] for node in graph_def.node if _UPDATE.match(node.op)}

    def is_added(name: str) -> bool:
        parts = name.split("/")
        below = ("/".join(parts[:length]) for length in range(1, len(parts)))
        return any(_GRADIENTS.fullmatch(part) for part in parts) or any(scope in scopes for scope in below)

    found = {
        node.name
        for node in graph_def.node
        if node.op not in state
        and not node.op.startswith("Assign")
        and not _UPDATE.match(node.op)
        and not is_added(node.name)
    }
    return found or {node.name for node in graph_def.node}


def subgraph(graph_def: tf.compat.v1.GraphDef, outputs: Iterable[str], control: bool = True) -> set[str]:
    """Names of the nodes that the outputs need; without `control`, through data inputs only."""
    nodes = {node.name: node for node in graph_def.node}
    needed: set[str] = set()
    pending = [node_name(name) for name in outputs]
    while pending:
        name = pending.pop()
        if name in needed or name not in nodes:
            continue
        needed.add(name)
        pending += [node_name(i) for i in nodes[name].input if control or not i.startswith("^")]
    return needed


def topological(nodes: Mapping[str, Any], outputs: Iterable[str]) -> list[Any]:
    """Nodes that outputs need by data, inputs first. What a loop feeds back is left out of the order."""
    ordered: list[Any] = []
    state: dict[str, int] = {}
    for output in outputs:
        stack = [node_name(output)]
        while stack:
            name = stack[-1]
            if state.get(name) == 2 or name not in nodes:
                stack.pop()
                continue
            node = nodes[name]
            if state.get(name) is None:
                state[name] = 1
                if node.op != "NextIteration":
                    stack += [
                        node_name(i)
                        for i in reversed(node.input)
                        if not i.startswith("^") and node_name(i) not in state
                    ]
                    continue
            stack.pop()
            state[name] = 2
            ordered.append(node)
    return ordered


def const_node(name: str, value: np.ndarray) -> Any:
    """A Const node."""
    node = tf.compat.v1.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = tf.as_dtype(value.dtype).as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    return node


@dataclass(eq=False)
class Bound:
    """A graph in which all lengths are known.

    Attributes:
        graph_def: what the outputs need, placeholders bound.
        graph: the same, imported.
        outputs: ``node:index``.
        samples: the batch length that was made up; 1 where none was.
        order: nodes, inputs first.
        unknown: (placeholder, axis) whose lengths were made up.
    """

    graph_def: tf.compat.v1.GraphDef
    graph: tf.Graph
    outputs: list[str]
    samples: int
    order: list[Any]
    unknown: list[tuple[str, int]] = field(default_factory=list)

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Shape of a tensor, None if not all of it is known."""
        node, index = tensor_of(tensor)
        found = self.graph.get_operation_by_name(node).outputs[index].shape
        return tuple(found.as_list()) if found.is_fully_defined() else None


def _bound_shape(
    node: Any, sizes: Mapping[str, Sequence[int]], offset: int, unknown: list[tuple[str, int]]
) -> list[int] | None:
    """The lengths that a placeholder gets; None if nothing is to be set."""
    if node.name in sizes:
        given = [int(size) for size in sizes[node.name]]
        proto = node.attr["shape"].shape
        stated = [] if proto.unknown_rank else [dim.size for dim in proto.dim]
        if not proto.unknown_rank and "shape" in node.attr:
            clash = len(stated) != len(given) or any(s not in (-1, g) for s, g in zip(stated, given, strict=True))
            if clash:
                raise ConfigError(f"input {node.name!r} has shape {given}; the graph says {stated}")
        return given
    proto = node.attr["shape"].shape
    if "shape" not in node.attr or proto.unknown_rank:
        return []  # a switch or a rate: is_training, keep_prob
    dims = [dim.size for dim in proto.dim]
    if -1 not in dims:
        return None
    unknown += [(node.name, axis) for axis, size in enumerate(dims) if size == -1]
    return made_up([None if size == -1 else size for size in dims], offset)


def made_up(shape: Sequence[int | None], offset: int = 0) -> list[int]:
    """A shape whose open lengths are made up: the first one is a batch, the others are lengths of an image."""
    return [
        size if size is not None else BATCH + offset if axis == 0 else _SPACE[(axis - 1) % len(_SPACE)] + 32 * offset
        for axis, size in enumerate(shape)
    ]


def _checked_sizes(sizes: Any) -> Mapping[str, Sequence[int]]:
    if sizes is None:
        return {}
    if not isinstance(sizes, Mapping):
        raise ConfigError(f"sizes is {kind_of(sizes)}; a dict is needed: {{placeholder: shape}}")
    for name, shape in sizes.items():
        if not isinstance(name, str):
            raise ConfigError(f"sizes: {name!r} is no name of a placeholder")
        whole = isinstance(shape, Iterable) and all(isinstance(n, (int, np.integer)) and n >= 0 for n in shape)
        if isinstance(shape, (str, bytes)) or not whole:
            raise ConfigError(f"sizes[{name!r}] is {shape!r}; a list of lengths is needed")
    return sizes


def bind(
    graph_def: tf.compat.v1.GraphDef,
    outputs: Sequence[str],
    sizes: Mapping[str, Sequence[int]] | None = None,
    alternative: bool = False,
) -> Bound:
    """The part of a graph that outputs need, with all its lengths known where the graph allows.

    Args:
        graph_def: the graph; not changed.
        outputs: ``node:index``.
        sizes: shapes of placeholders, by name; unknown lengths of the others are made up.
        alternative: make up other lengths, to see which values depend on them.

    Raises:
        ConfigError: `sizes` names no placeholder, or another shape than the graph says.
        ModelError: the graph is inconsistent.
    """
    given = {node_name(name): shape for name, shape in _checked_sizes(sizes).items()}
    needed = subgraph(graph_def, outputs)
    placeholders = {node.name for node in graph_def.node if node.op.startswith("Placeholder")}
    for name in given:
        if name not in placeholders:
            raise ConfigError(f"sizes: {name!r} is no placeholder of the graph; {nearest(name, placeholders)}")
    result = tf.compat.v1.GraphDef(versions=graph_def.versions)
    result.library.CopyFrom(graph_def.library)
    unknown: list[tuple[str, int]] = []
    samples = 1
    for node in graph_def.node:
        if node.name not in needed:
            continue
        copied = result.node.add()
        copied.CopyFrom(node)
        copied.device = ""
        for attribute in ("_output_shapes", "_class"):
            if attribute in copied.attr:
                del copied.attr[attribute]
        if node.op in ("Placeholder", "PlaceholderWithDefault", "PlaceholderV2"):
            before = len(unknown)
            shape = _bound_shape(node, given, int(alternative), unknown)
            if shape is not None:
                copied.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
            if (node.name, 0) in unknown[before:]:
                samples = BATCH + int(alternative)
    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.import_graph_def(result, name="")
    except (ValueError, TypeError, tf.errors.OpError, RuntimeError) as error:
        why = first_line(error)
        lengths = unknown and any(word in why.lower() for word in ("dimension", "shape", "size"))
        hint = f"; {FIX_LENGTHS}" if lengths else ""
        raise ModelError(f"the graph cannot be imported: {why}{hint}") from error
    for output in outputs:
        name, index = tensor_of(output)
        count = len(graph.get_operation_by_name(name).outputs)
        if index >= count:
            raise ConfigError(
                f"outputs: {output!r}: operator {name!r} has {count} output{'' if count == 1 else 's'}, numbered from 0"
            )
    nodes = {node.name: node for node in result.node}
    # The order leaves out what a loop feeds back, so what its body reads from outside is asked for by name.
    entered = [node.name for node in result.node if node.op in ENTERS]
    return Bound(result, graph, list(outputs), samples, topological(nodes, [*outputs, *entered]), unknown)
