"""Label every tensor of a graph: one walk over its operators, inputs first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from openwork.graph.labels import LabelMap, LabelStore
from openwork.tensorflow.graphs import ENTERS, VARIABLES, Bound, tensor_of
from openwork.tensorflow.rules import RULES, Context, NotKnown, Record
from openwork.tensorflow.values import known_values

__all__ = ["Trace", "WeightSource", "trace"]

_FLOATS = {tf.float16, tf.bfloat16, tf.float32, tf.float64}
# Operators through which a weight goes unchanged on its way to a layer.
_PASSED_ON = {"Identity", "ReadVariableOp", "RefIdentity", "Snapshot", "StopGradient", "Switch", "RefSwitch", "Enter",
              "RefEnter", "CheckNumerics"}  # fmt: skip


@dataclass(frozen=True)
class WeightSource:
    """Where a weight comes from.

    Attributes:
        kind: ``const``, ``ref`` (a reference variable) or ``resource``.
        name: name of the constant or variable operator; plans name the parameter so.
        shape: its shape.
        dtype: its type.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: tf.DType


@dataclass(eq=False)
class Trace:
    """A labelled graph.

    Attributes:
        bound: the graph.
        store: the labels.
        records: its operators, inputs first.
        labels: label map of each tensor, ``node:index``; tensors whose shape is not known are missing.
        sources: weights by name.
        parameters: label map of each weight.
    """

    bound: Bound
    store: LabelStore
    records: list[Record]
    labels: dict[str, LabelMap]
    sources: dict[str, WeightSource]
    parameters: dict[str, LabelMap]


class _Tracer:
    def __init__(self, bound: Bound, layers: Mapping[str, str]) -> None:
        self.bound = bound
        self.store = LabelStore()
        self.store.layers.update(layers)
        self.trace = Trace(bound, self.store, [], {}, {}, {})
        self._handles: dict[str, str] = {}  # tensor -> variable, through which it may be read
        self._weights: dict[str, str] = {}  # tensor -> weight that it is
        wanted = [
            node_inputs[place]
            for node in bound.order
            if node.op in RULES
            for node_inputs in [_data_inputs(node)]
            for place in RULES[node.op].values
            if -len(node_inputs) <= place < len(node_inputs)
        ]
        self._values = known_values(bound, wanted)

    def run(self) -> Trace:
        for node in self.bound.order:
            self.store.location = f"{node.op} {node.name}"
            self._walk(node)
        self.store.location = "output of the graph"
        for output in self.bound.outputs:
            if output in self.trace.labels:
                self.store.freeze_map(self.trace.labels[output], "the caller sees these channels")
        return self.trace

    def _walk(self, node: Any) -> None:
        shapes = [self.bound.shape(f"{node.name}:{i}") for i in range(self._output_count(node))]
        if node.op in VARIABLES:
            self._variable(node)
            return
        if node.op == "Const":
            self._constant(node, shapes[0] or ())
            return
        inputs = _data_inputs(node)
        if node.op in ENTERS:
            self._enter(inputs[0])
        if node.op == "ReadVariableOp" and inputs[0] in self._handles:
            self._read(f"{node.name}:0", self._handles[inputs[0]])
            return
        if inputs and inputs[0] in self._handles and node.op in _PASSED_ON:
            for index in range(len(shapes)):
                self._handles[f"{node.name}:{index}"] = self._handles[inputs[0]]
            self._remember(node, [LabelMap(())] * len(shapes))
            return
        if node.op == "ResourceGather" and inputs[0] in self._handles:
            self._read(inputs[0], self._handles[inputs[0]])
        if inputs and inputs[0] in self._weights and node.op in _PASSED_ON:
            for index in range(len(shapes)):
                self._weights[f"{node.name}:{index}"] = self._weights[inputs[0]]
        self._operator(node, inputs, shapes)

    def _enter(self, tensor: str) -> None:
        """What a loop reads is held: its body, which runs again on what it made, is not looked into."""
        if tensor in self._handles:
            name = self._handles[tensor]
            known = self.trace.labels[tensor]
            self._read(tensor, name)
            self.trace.labels[tensor] = known
            self._weights.pop(tensor, None)
            read = self.trace.parameters.get(name)
        else:
            read = self.trace.labels.get(tensor)
        if read is not None:
            self.store.freeze_map(read, "a loop reads it")

    def _output_count(self, node: Any) -> int:
        return len(self.bound.graph.get_operation_by_name(node.name).outputs)

    def _remember(self, node: Any, maps: Sequence[LabelMap | None]) -> None:
        for index, found in enumerate(maps):
            if found is not None:
                self.trace.labels[f"{node.name}:{index}"] = found

    def _variable(self, node: Any) -> None:
        kind = "resource" if node.op == "VarHandleOp" else "ref"
        shape = tf.TensorShape(node.attr["shape"].shape)
        if kind == "resource":
            self._handles[f"{node.name}:0"] = node.name
            self.trace.labels[f"{node.name}:0"] = LabelMap(())
        if shape.is_fully_defined():
            dtype = tf.as_dtype(node.attr["dtype"].type).base_dtype
            self._source(WeightSource(kind, node.name, tuple(shape.as_list()), dtype))
            if kind == "ref":
                self._read(f"{node.name}:0", node.name)

    def _source(self, source: WeightSource) -> None:
        self.trace.sources[source.name] = source

    def _read(self, tensor: str, name: str) -> None:
        source = self.trace.sources.get(name)
        if source is None:
            return
        if name not in self.trace.parameters:
            labelled = source.dtype in _FLOATS
            self.trace.parameters[name] = (
                self.store.parameter(name, source.shape) if labelled else LabelMap(source.shape, weight=True)
            )
        self.trace.labels[tensor] = self.trace.parameters[name]
        self._weights[tensor] = name

    def _constant(self, node: Any, shape: tuple[int, ...]) -> None:
        dtype = tf.as_dtype(node.attr["dtype"].type)
        if dtype in _FLOATS and any(size > 1 for size in shape):
            self._source(WeightSource("const", node.name, shape, dtype))
            self._read(f"{node.name}:0", node.name)
        else:
            self.trace.labels[f"{node.name}:0"] = LabelMap(shape, weight=True)

    def _operator(self, node: Any, names: list[str], shapes: list[tuple[int, ...] | None]) -> None:
        if node.op in ("Merge", "RefMerge"):
            names = [name for name in names if name in self.trace.labels]  # not what a loop feeds back
        found = [self.trace.labels.get(name) for name in names]
        inputs = [tensor for tensor in found if tensor is not None]
        rule = RULES.get(node.op)
        if node.op.startswith("FusedBatchNorm"):
            shapes = [shapes[0], *(shape or () for shape in shapes[1:])]  # what it keeps for its gradient has none
        if len(inputs) < len(found) or None in shapes:
            for tensor in inputs:
                self.store.freeze_map(tensor, "the shape of its inputs or outputs is not known")
            self._remember(node, [None if shape is None else LabelMap(shape) for shape in shapes])
            return
        known = [shape for shape in shapes if shape is not None]
        weight = bool(inputs) and all(tensor.weight for tensor in inputs)
        plain = [LabelMap(shape, weight=weight) for shape in known]
        if node.op.startswith("Placeholder") and not names:
            self._remember(node, plain)
            return
        if not any(tensor.entries for tensor in inputs) and not (rule is not None and rule.makes):
            self._remember(node, plain)
            return
        if rule is None:
            for tensor in inputs:
                self.store.freeze_map(tensor, "no rule for this operator")
            self._remember(node, plain)
            return
        values = {
            place: self._values[names[place]] for place in (p % max(1, len(names)) for p in rule.values)
            if place < len(names) and names[place] in self._values
        }  # fmt: skip
        parameters = {place: self._weights[name] for place, name in enumerate(names) if name in self._weights}
        context = Context(self.store, node, inputs, known, values, parameters)
        try:
            made = rule.label(context)
        except NotKnown as reason:
            for tensor in inputs:
                self.store.freeze_map(tensor, str(reason))
            made = plain
        maps = [made] if isinstance(made, LabelMap) else list(made)
        results: list[LabelMap] = []
        for index, shape in enumerate(known):
            labelled = maps[index] if index < len(maps) else None
            if labelled is None:
                labelled = LabelMap(shape, weight=weight)
            elif labelled.shape != shape:
                for tensor in (*inputs, labelled):
                    self.store.freeze_map(tensor, "this use of the operator is not understood")
                labelled = LabelMap(shape, weight=weight)
            results.append(labelled)
        self._remember(node, results)
        self.trace.records.append(Record(node, inputs, results, values, rule, context.cost, context.weight, parameters))
        self._name_layers(node, context)

    def _name_layers(self, node: Any, context: Context) -> None:
        """A weight belongs to the first operator that reads it."""
        for place, name in context.parameters.items():
            if node.op not in _PASSED_ON and place not in context.values:
                self.store.layers.setdefault(name, node.name)


def _data_inputs(node: Any) -> list[str]:
    return ["{}:{}".format(*tensor_of(name)) for name in node.input if not name.startswith("^")]


def trace(bound: Bound, layers: Mapping[str, str]) -> Trace:
    """Label a graph whose lengths are known.

    Args:
        bound: the graph.
        layers: names of layers by weight; other weights belong to the first operator that reads them.
    """
    return _Tracer(bound, layers).run()
