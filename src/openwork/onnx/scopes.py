"""Who makes and who reads each value of an ONNX model, through bodies of If, Loop and Scan and local functions.

Names resolve from the inside out; a local function sees only its own. Each definition is one `Value` object, so that
two bodies that use one name for different things are kept apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from openwork.errors import ConversionError

__all__ = ["DEFAULT_DOMAINS", "Reading", "Scope", "Value", "bodies", "default_opset", "label", "read_scopes"]

DEFAULT_DOMAINS = ("", "ai.onnx")
_MAXIMUM_DEPTH = 60


@dataclass(eq=False)
class Reading:
    """One use of a value.

    Attributes:
        node: the node that reads it, or None for an output of the graph or function.
        slot: which input of the node (or output of the graph).
        scope: where the node is.
    """

    node: NodeProto | None
    slot: int
    scope: Scope


@dataclass(eq=False)
class Value:
    """One definition of a name.

    Attributes:
        name: its name.
        scope: where it is defined.
        node: the node that makes it, if any.
        tensor: the initializer that it is, if any.
        is_input: it is an input of its graph or function (an initializer may be one too: a default).
        readings: all uses.
    """

    name: str
    scope: Scope
    node: NodeProto | None = None
    tensor: TensorProto | None = None
    is_input: bool = False
    readings: list[Reading] = field(default_factory=list)


@dataclass(eq=False)
class Scope:
    """A graph, a body, or a local function.

    Attributes:
        holder: the GraphProto or FunctionProto.
        parent: the scope around a body, else None.
        where: words for messages; empty for the main graph.
        opset: version of the default domain here; 0 when it is not imported.
        nodes: the nodes of the holder, always the same objects.
        values: name -> definition.
    """

    holder: GraphProto | FunctionProto
    parent: Scope | None
    where: str
    opset: int = 0
    nodes: list[NodeProto] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)

    @property
    def is_function(self) -> bool:
        return isinstance(self.holder, FunctionProto)

    @property
    def root(self) -> Scope:
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope

    def find(self, name: str) -> Value | None:
        """The definition that `name` means here."""
        scope: Scope | None = self
        while scope is not None:
            value = scope.values.get(name)
            if value is not None:
                return value
            scope = scope.parent
        return None


def default_opset(imports: Any) -> int:
    """Version of the default domain among opset imports; 0 when it is not imported."""
    return max((entry.version for entry in imports if entry.domain in DEFAULT_DOMAINS), default=0)


def bodies(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """Graph attributes of a node, by attribute name."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.name, attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            for graph in attribute.graphs:
                yield attribute.name, graph


def label(node: NodeProto) -> str:
    """Words for a node in messages."""
    return f"{node.op_type} {node.name!r}" if node.name else f"{node.op_type} of {list(node.output)[:1]}"


def read_scopes(model: ModelProto) -> list[Scope]:
    """Scopes of a model: the main graph, its bodies, then each local function and its bodies.

    Raises:
        ConversionError: a name defined twice in one scope, a name that nothing defines, or a cycle.
    """
    scopes: list[Scope] = []
    opset = default_opset(model.opset_import)
    _read(model.graph, None, "", opset, scopes, 0)
    for function in model.functions:
        own = default_opset(function.opset_import) or opset
        _read(function, None, f"function {function.name!r}", own, scopes, 0)
    return scopes


def _read(holder: Any, parent: Scope | None, where: str, opset: int, scopes: list[Scope], depth: int) -> None:
    if depth > _MAXIMUM_DEPTH:
        raise ConversionError(f"{where}: bodies are nested more than {_MAXIMUM_DEPTH} deep")
    scope = Scope(holder, parent, where, opset, list(holder.node))
    scopes.append(scope)
    if isinstance(holder, GraphProto):
        for info in holder.input:
            _define(scope, Value(info.name, scope, is_input=True))
        for tensor in holder.initializer:
            known = scope.values.get(tensor.name)
            if known is not None and known.is_input and known.tensor is None:
                known.tensor = tensor
            else:
                _define(scope, Value(tensor.name, scope, tensor=tensor))
        for sparse in holder.sparse_initializer:
            if sparse.values.name not in scope.values:
                _define(scope, Value(sparse.values.name, scope))
        outputs = [info.name for info in holder.output]
    else:
        for name in holder.input:
            _define(scope, Value(name, scope, is_input=True))
        outputs = list(holder.output)
    for node in scope.nodes:
        for name in node.output:
            if name:
                _define(scope, Value(name, scope, node=node))
    _refuse_cycles(scope)
    for node in scope.nodes:
        for slot, name in enumerate(node.input):
            if not name:
                continue
            value = scope.find(name)
            if value is None:
                raise ConversionError(f"{_place(scope)}{label(node)} reads {name!r}, which nothing makes")
            value.readings.append(Reading(node, slot, scope))
        for attribute, body in bodies(node):
            _read(body, scope, f"{_place(scope)}{attribute} of {label(node)}", opset, scopes, depth + 1)
    for slot, name in enumerate(outputs):
        value = scope.find(name)
        if value is None:
            raise ConversionError(f"{_place(scope)}output {name!r} is made by nothing")
        value.readings.append(Reading(None, slot, scope))


def _place(scope: Scope) -> str:
    return f"{scope.where}: " if scope.where else ""


def _define(scope: Scope, value: Value) -> None:
    if value.name in scope.values:
        raise ConversionError(f"{_place(scope)}the name {value.name!r} is defined twice")
    scope.values[value.name] = value


def _outside_names(graph: GraphProto, depth: int = 0) -> set[str]:
    """Names that a body takes from around it."""
    if depth > _MAXIMUM_DEPTH:
        return set()
    inside = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    inside |= {sparse.values.name for sparse in graph.sparse_initializer}
    read = {info.name for info in graph.output}
    for node in graph.node:
        inside.update(node.output)
        read.update(node.input)
        for _, body in bodies(node):
            read |= _outside_names(body, depth + 1)
    return read - inside


def _refuse_cycles(scope: Scope) -> None:
    """Kahn's algorithm over the nodes of one scope (1962)."""
    nodes = scope.nodes
    maker = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    waits: list[set[int]] = []
    readers: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        names = set(node.input)
        for _, body in bodies(node):
            names |= _outside_names(body)
        before = {maker[name] for name in names if name in maker}
        waits.append(before)
        for other in before:
            readers[other].append(index)
    left = [len(before) for before in waits]
    ready = [index for index, count in enumerate(left) if count == 0]
    done = 0
    while ready:
        index = ready.pop()
        done += 1
        for reader in readers[index]:
            left[reader] -= 1
            if left[reader] == 0:
                ready.append(reader)
    if done == len(nodes):
        return
    # Walk backwards among the stuck nodes until one comes again: that is a cycle.
    index = next(index for index, count in enumerate(left) if count)
    seen: list[int] = []
    while index not in seen:
        seen.append(index)
        index = next(other for other in sorted(waits[index]) if left[other])
    cycle = [label(nodes[step]) for step in reversed(seen[seen.index(index) :])]
    shown = " -> ".join(cycle[:4]) + (" -> ..." if len(cycle) > 4 else "")
    raise ConversionError(f"{_place(scope)}the graph is cyclic: {shown} -> {cycle[0]}")
