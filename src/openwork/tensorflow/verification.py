"""Masked equivalence: the proof that a cut graph means the same as the masked original.

The original runs with every consumer's weights zeroed at the removed positions. Operators that mix positions with
statistics (softmax, means, sums, norms) take them over the surviving ones, and products of two activations get
zeros at the removed ones, as in the smaller graph. The results must be equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from openwork.errors import ConfigError, ModelError, nearest
from openwork.graph.labels import LabelMap
from openwork.graph.plan import Cut, Plan, given_plan
from openwork.graph.sizes import surviving_shape
from openwork.tensorflow.analysis import GraphAnalysis, analyze_graph
from openwork.tensorflow.graphs import (
    as_graph_def,
    const_node,
    first_line,
    node_name,
    output_names,
    subgraph,
    tensor_of,
)
from openwork.tensorflow.rules import Record, attribute
from openwork.tensorflow.surgery import cuts_by_parameter
from openwork.tensorflow.values import constant_of

__all__ = ["PRODUCTS", "difference", "masked_graph", "masked_weight", "mixed_axes", "run_graph", "verify_graph"]

_REDUCING = {"Mean", "Sum", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm"}
PRODUCTS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D", "Conv3D",
             "Conv2DBackpropInput", "Conv3DBackpropInputV2"}  # fmt: skip


def mixed_axes(record: Record) -> list[int]:
    """Axes of the first input along which the operator takes statistics."""
    rank = len(record.inputs[0].shape) if record.inputs else 0
    if record.name in _REDUCING and 1 in record.values:
        return [int(axis) % max(1, rank) for axis in np.atleast_1d(record.values[1])]
    if record.name in ("Softmax", "LogSoftmax"):
        return [rank - 1]
    if record.name == "L2Loss":
        return list(range(rank))
    if record.name.startswith("FusedBatchNorm") and attribute(record.node, "is_training", True):
        channel = 1 if attribute(record.node, "data_format", "NHWC").startswith("NC") else rank - 1
        return [axis for axis in range(rank) if axis != channel]
    return []


def _alive(labels: LabelMap, dead: np.ndarray) -> np.ndarray | None:
    """bool, of the tensor's shape: positions that stay; None if all do."""
    mask: np.ndarray | None = None
    for entry in labels.entries:
        if dead[entry.labels].any():
            shape = [size if axis in entry.axes else 1 for axis, size in enumerate(labels.shape)]
            part = ~dead[entry.labels].reshape(shape)
            mask = part if mask is None else mask & part
    return None if mask is None else np.broadcast_to(mask, labels.shape)


def masked_weight(values: np.ndarray, cuts: Sequence[Cut], consumed: Collection[tuple[str, int, int]]) -> np.ndarray:
    """The weight with zeros at the removed positions of the axes that read channels.

    Args:
        values: the weight.
        cuts: what goes from it.
        consumed: see `GraphAnalysis.consumed`.
    """
    for one in cuts:
        if (one.parameter, one.axis, one.blocks) in consumed:
            values = _masked_axis(values, one)
    return values


def _masked_axis(values: np.ndarray, one: Cut) -> np.ndarray:
    alive = np.ones(one.size, dtype=bool)
    alive[one.removed] = False
    result = values.copy()
    ordered = np.moveaxis(result, one.axis, 0)
    if one.blocks == 1:
        ordered[~alive] = 0
        return result
    rows_axis = 0 if one.axis == 1 else one.axis + 1
    rows = np.moveaxis(result, (rows_axis, one.axis), (0, 1))
    per_block = rows.shape[0] // one.blocks
    for block, mask in enumerate(alive.reshape(one.blocks, -1)):
        rows[block * per_block : (block + 1) * per_block, ~mask] = 0
    return result


class _Rewriting:
    """Edits a copy of the analysed graph."""

    def __init__(self, analysis: GraphAnalysis) -> None:
        self.result = tf.compat.v1.GraphDef()
        self.result.CopyFrom(analysis.graph_def)
        self.nodes = {node.name: node for node in self.result.node}

    def add(self, node: Any) -> str:
        added = self.result.node.add()
        added.CopyFrom(node)
        self.nodes[added.name] = added
        return str(added.name)

    def _operator(self, op: str, name: str, inputs: Sequence[str], dtype: int, **kinds: Any) -> str:
        node = tf.compat.v1.NodeDef(name=name, op=op, input=inputs)
        for key, value in kinds.items():
            if isinstance(value, str):
                node.attr[value].type = dtype
            elif isinstance(value, tf.DType):
                node.attr[key].type = value.as_datatype_enum
            else:
                node.attr[key].i = value
        return self.add(node)

    def _picked(self, name: str, flat: str, index: np.ndarray, shape: Sequence[int], dtype: int) -> str:
        """Elements of a flat tensor, as a tensor of the given shape."""
        places = self.add(const_node(f"{name}/places", index.astype(np.int64)))
        axis = self.add(const_node(f"{name}/axis", np.asarray(0, dtype=np.int32)))
        taken = self._operator(
            "GatherV2", f"{name}/taken", [flat, places, axis], dtype, a="Tparams", Tindices=tf.int64, Taxis=tf.int32
        )
        target = self.add(const_node(f"{name}/shape", np.asarray(shape, dtype=np.int32)))
        return self._operator("Reshape", name, [taken, target], dtype, a="T", Tshape=tf.int32)

    def _flat(self, name: str, tensor: str, dtype: int) -> str:
        target = self.add(const_node(f"{name}/all", np.asarray([-1], dtype=np.int32)))
        return self._operator("Reshape", name, [tensor, target], dtype, a="T", Tshape=tf.int32)

    def over_survivors(self, record: Record, dead: np.ndarray) -> None:
        """Let an operator see the surviving positions only; its results get ones elsewhere."""
        name = record.module
        node = self.nodes[name]
        dtype = node.attr["T"].type
        moved = tf.compat.v1.NodeDef()
        moved.CopyFrom(node)
        moved.name = f"{name}/over_survivors"
        for place, labels in enumerate(record.inputs):
            alive = _alive(labels, dead)
            if alive is None or place in record.values:
                continue
            flat = self._flat(f"{name}/flat_{place}", node.input[place], dtype)
            shape = surviving_shape(labels, dead)
            moved.input[place] = self._picked(f"{name}/alive_{place}", flat, np.flatnonzero(alive), shape, dtype)
        made = self.add(moved)
        node.Clear()
        node.name = f"{name}/replaced"
        labels = record.outputs[0]
        alive = _alive(labels, dead)
        flat = self._flat(f"{name}/flat", made, dtype)
        if alive is None:
            index = np.arange(int(np.prod(labels.shape)))
        else:
            one = self.add(const_node(f"{name}/one", np.ones(1, dtype=tf.as_dtype(dtype).as_numpy_dtype)))
            axis = self.add(const_node(f"{name}/along", np.asarray(0, dtype=np.int32)))
            joined = tf.compat.v1.NodeDef(name=f"{name}/padded", op="ConcatV2", input=[flat, one, axis])
            joined.attr["N"].i = 2
            joined.attr["T"].type = dtype
            joined.attr["Tidx"].type = tf.int32.as_datatype_enum
            flat = self.add(joined)
            index = np.where(alive.ravel(), np.cumsum(alive.ravel()) - 1, int(alive.sum()))
        self._picked(name, flat, index, labels.shape, dtype)
        self.result.node.remove(node)

    def without_dead(self, record: Record, dead: np.ndarray) -> None:
        """Let a product of computed tensors see zeros at the removed positions."""
        node = self.nodes[record.module]
        dtype = node.attr["T"].type
        for place, labels in enumerate(record.inputs):
            alive = _alive(labels, dead)
            if alive is None or place in record.values:
                continue
            name = f"{record.module}/masked_{place}"
            mask = self.add(const_node(f"{name}/mask", alive.astype(tf.as_dtype(dtype).as_numpy_dtype)))
            node.input[place] = self._operator("Mul", name, [node.input[place], mask], dtype, a="T")


def masked_graph(analysis: GraphAnalysis, plan: Plan) -> tf.compat.v1.GraphDef:
    """The original with everything masked that the plan removes.

    Args:
        analysis: of the frozen original, made with the shapes of the inputs that will be fed.
        plan: what goes.
    """
    dead = analysis.dead(plan)
    consumed = analysis.consumed()
    shapes = {name: source.shape for name, source in analysis.sources.items()}
    rewriting = _Rewriting(analysis)
    for name, parts in cuts_by_parameter(plan, shapes).items():
        node = rewriting.nodes[name]
        values = masked_weight(constant_of(node), parts, consumed)
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(values))
    for record in analysis.trace.records:
        mixed = set(mixed_axes(record))
        touched = [e for e in (record.inputs[0].entries if record.inputs else ()) if dead[e.labels].any()]
        if any(mixed & set(entry.axes) for entry in touched):
            rewriting.over_survivors(record, dead)
        elif record.name in PRODUCTS and not record.parameters:
            rewriting.without_dead(record, dead)
    return rewriting.result


def run_graph(
    graph_def: tf.compat.v1.GraphDef, outputs: Sequence[str], feeds: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """Outputs of a frozen graph in a session of its own.

    Raises:
        ModelError: it cannot be run.
    """
    with tf.Graph().as_default() as graph:
        try:
            tf.import_graph_def(graph_def, name="")
            with tf.compat.v1.Session(graph=graph) as session:
                return list(session.run(list(outputs), dict(feeds)))
        except (ValueError, TypeError, KeyError, tf.errors.OpError) as error:
            raise ModelError(f"the graph cannot be run: {first_line(error)}") from error


def difference(expected: np.ndarray, actual: np.ndarray) -> float:
    """max |difference| / max |expected|; infinite where shapes differ or nothing can be proved."""
    expected, actual = np.asarray(expected), np.asarray(actual)
    if expected.shape != actual.shape:
        return float("inf")
    if not expected.size:
        return 0.0
    if expected.dtype.kind not in "fc" and expected.dtype != tf.bfloat16.as_numpy_dtype:
        return 0.0 if bool((expected == actual).all()) else float("inf")
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    if not np.isfinite(a).all() or not np.isfinite(b).all():
        return float("inf")
    return float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30))


def _checked_feeds(
    graph_def: tf.compat.v1.GraphDef, outputs: Sequence[str], feeds: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    placeholders = {node.name for node in graph_def.node if node.op.startswith("Placeholder")}
    needed = subgraph(graph_def, output_names(graph_def, outputs))
    checked = {}
    if not isinstance(feeds, Mapping):
        raise ConfigError(f"feeds is a {type(feeds).__name__}; a dict is needed: {{placeholder: array}}")
    for key, value in feeds.items():
        name = key if isinstance(key, str) else getattr(key, "name", None)  # a tensor, as sessions take it
        if not isinstance(name, str):
            raise ConfigError(f"feeds: {key!r} is no name of a placeholder; {nearest('', placeholders)}")
        if node_name(name) not in placeholders:
            raise ConfigError(f"feeds: {name!r} is no placeholder; {nearest(node_name(name), placeholders)}")
        try:
            checked["{}:{}".format(*tensor_of(name))] = np.asarray(value)
        except ValueError as error:
            raise ConfigError(f"feeds[{name!r}] is no array: {first_line(error)}") from error
    for node in graph_def.node:
        if node.op == "Placeholder" and node.name in needed and f"{node.name}:0" not in checked:
            raise ConfigError(f"feeds: placeholder {node.name!r} is not fed, and the outputs need it")
    return checked


def verify_graph(
    original: tf.compat.v1.GraphDef,
    smaller: tf.compat.v1.GraphDef,
    plan: Plan,
    outputs: Sequence[str],
    feeds: Mapping[str, Any],
) -> float:
    """Masked equivalence of a cut graph.

    Args:
        original: the frozen graph before.
        smaller: what the plan made of it.
        plan: the plan.
        outputs: names of the outputs.
        feeds: arrays by placeholder.

    Returns:
        max |difference| / max |output| over the outputs; infinite if shapes differ or values are not finite.

    Raises:
        ConfigError: an output or feed is not in the graph.
        RecordError: the plan is of another graph.
        ModelError: a graph cannot be run.
    """
    given_plan(plan)
    original, smaller = as_graph_def(original, "original"), as_graph_def(smaller, "smaller")
    given = _checked_feeds(original, outputs, feeds)
    analysis = analyze_graph(original, outputs, {name: value.shape for name, value in given.items()})
    expected = run_graph(masked_graph(analysis, plan), analysis.outputs, given)
    actual = run_graph(smaller, analysis.outputs, given)
    return max(difference(e, a) for e, a in zip(expected, actual, strict=True))
