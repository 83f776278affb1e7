"""Cut a frozen graph: constants lose positions, and what states a size is set to the new one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from openwork.errors import ModelError, RecordError, nearest
from openwork.graph.plan import Cut, Plan
from openwork.graph.sizes import surviving_shape
from openwork.tensorflow.analysis import GraphAnalysis
from openwork.tensorflow.functions import inlined
from openwork.tensorflow.graphs import FIX_LENGTHS, bind, const_node, node_name, subgraph, tensor_of
from openwork.tensorflow.helpers import without_helpers
from openwork.tensorflow.values import constant_of, known_values

__all__ = ["cut", "cut_array", "cuts_by_parameter"]


def cut_array(values: np.ndarray, cuts: Iterable[Cut]) -> np.ndarray:
    """The array without the removed positions.

    Args:
        values: a weight; filters are [taps.., in / groups, out].
        cuts: what goes; several cuts of one axis (a concatenation is read) are joined.
    """
    by_axis: dict[tuple[int, int], list[Cut]] = defaultdict(list)
    for one in cuts:
        by_axis[one.axis, one.blocks].append(one)
    # The inner axis of grouped filters is cut per block of outputs, so the outputs first: blocks stay sorted.
    for (axis, blocks), parts in sorted(by_axis.items(), key=lambda item: item[0][1] > 1):
        joined = replace(parts[0], removed=np.unique(np.concatenate([part.removed for part in parts])))
        if blocks == 1:
            values = np.take(values, joined.kept, axis=axis)
            continue
        per_block = joined.size // blocks
        rows_axis = 0 if axis == 1 else axis + 1
        kept = joined.kept.reshape(blocks, -1) % per_block
        ordered = np.moveaxis(values, (rows_axis, axis), (0, 1))
        rows = ordered.reshape(blocks, ordered.shape[0] // blocks, *ordered.shape[1:])
        taken = np.stack([np.take(row, index, axis=1) for row, index in zip(rows, kept, strict=True)])
        values = np.moveaxis(taken.reshape(ordered.shape[0], kept.shape[1], *ordered.shape[2:]), (0, 1),
                             (rows_axis, axis))  # fmt: skip
    return np.ascontiguousarray(values)


def cuts_by_parameter(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[Cut]]:
    """The cuts of each weight, after a check that they fit.

    Raises:
        RecordError: the plan is of another graph.
    """
    found: dict[str, list[Cut]] = defaultdict(list)
    for one in plan.cuts:
        if one.parameter not in shapes:
            raise RecordError(
                f"weight {one.parameter!r} of the plan is not in the graph; {nearest(one.parameter, shapes)}"
            )
        shape = shapes[one.parameter]
        if one.axis >= len(shape) or shape[one.axis] * one.blocks != one.size:
            raise RecordError(
                f"weight {one.parameter!r} has shape {list(shape)}; the plan needs {one.size // one.blocks} on axis "
                f"{one.axis} (it is of another graph, or already cut)"
            )
        found[one.parameter].append(one)
    return found


def cut(graph_def: tf.compat.v1.GraphDef, analysis: GraphAnalysis, plan: Plan) -> tf.compat.v1.GraphDef:
    """A smaller frozen graph.

    Args:
        graph_def: the frozen graph; not changed.
        analysis: what `analyze_graph` gave for it.
        plan: what goes.

    Returns:
        The nodes that the outputs need, with smaller constants; names are kept, helper operators are gone.

    Raises:
        RecordError: the plan is of another graph.
        ModelError: a weight is not a constant, or a size in the graph depends on data.
    """
    sources = analysis.sources
    cuts = cuts_by_parameter(plan, {name: source.shape for name, source in sources.items()})
    for name in cuts:
        if sources[name].kind != "const":
            raise ModelError(f"weight {name!r} is a variable; freeze the graph before it is cut")
    dead = analysis.dead(plan)
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(inlined(without_helpers(graph_def)))
    nodes = {node.name: node for node in result.node}
    for name, parts in cuts.items():
        node = nodes[name]
        value = cut_array(constant_of(node), parts)
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
    for node in result.node:
        for attribute in ("_output_shapes", "_class"):
            if attribute in node.attr:
                del node.attr[attribute]
        if node.op == "EnsureShape" and f"{node.name}:0" in analysis.labels:
            _ensure(node, analysis.labels[f"{node.name}:0"], dead)
    _set_sizes(result, nodes, analysis, dead)
    kept = subgraph(result, analysis.outputs)
    smaller = tf.compat.v1.GraphDef(versions=result.versions)
    smaller.library.CopyFrom(result.library)
    smaller.node.extend(node for node in result.node if node.name in kept)
    _check(smaller, analysis, dead)
    return smaller


def _ensure(node: Any, labels: Any, dead: np.ndarray) -> None:
    """A stated shape follows the removal; lengths that it leaves open stay open."""
    stated = node.attr["shape"].shape
    for dim, size in zip(stated.dim, surviving_shape(labels, dead), strict=not stated.unknown_rank):
        if dim.size != -1:
            dim.size = size


def _set_sizes(result: Any, nodes: dict[str, Any], analysis: GraphAnalysis, dead: np.ndarray) -> None:
    """Compare each value that states a size with what it must be, and replace it where it differs."""
    bound = analysis.trace.bound
    wanted: dict[tuple[str, int], np.ndarray] = {}
    for record in analysis.trace.records:
        if record.rule is None or record.rule.expected is None:
            continue
        if not any(dead[entry.labels].any() for m in (*record.inputs, *record.outputs) for entry in m.entries):
            continue
        for place, value in record.rule.expected(record, dead).items():
            wanted[record.module, place] = value
    if not wanted:
        return

    def tensor(name: str, place: int) -> str:
        return "{}:{}".format(*tensor_of([i for i in nodes[name].input if not i.startswith("^")][place]))

    def shape(name: str) -> tuple[int, ...] | None:
        labels = analysis.labels.get(name)
        return bound.shape(name) if labels is None else surviving_shape(labels, dead)

    names = [tensor(*key) for key in wanted]
    found = known_values(bound, names, shape)
    moving = _moving(analysis, names)
    for (name, place), value in wanted.items():
        source = tensor(name, place)
        actual = found.get(source)
        if actual is None or np.array_equal(actual, value):
            continue
        _replace(result, nodes, (name, place), source, value, actual, moving.get(source))


def _moving(analysis: GraphAnalysis, names: list[str]) -> dict[str, np.ndarray]:
    """Which elements depend on lengths that the graph leaves open, by tensor."""
    bound = analysis.trace.bound
    if not bound.unknown:
        return {}
    other = bind(bound_source(analysis), analysis.outputs, analysis.sizes, alternative=True)
    first, second = known_values(bound, names), known_values(other, names)
    return {name: first[name] != second[name] for name in names if name in first and name in second}


def bound_source(analysis: GraphAnalysis) -> tf.compat.v1.GraphDef:
    """The analysed graph with the lengths open again that were made up."""
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(analysis.graph_def)
    nodes = {node.name: node for node in result.node}
    for name, axis in analysis.trace.bound.unknown:
        nodes[name].attr["shape"].shape.dim[axis].size = -1
    return result


def _replace(
    result: Any,
    nodes: dict[str, Any],
    key: tuple[str, int],
    source: str,
    value: np.ndarray,
    actual: np.ndarray,
    moving: np.ndarray | None,
) -> None:
    name, place = key
    reader = nodes[name]
    if moving is not None and moving.any():
        wrong = (np.atleast_1d(actual != value)) & np.atleast_1d(moving)
        if wrong.any():
            # At most one length can be left for TensorFlow to find.
            if reader.op != "Reshape" or wrong.sum() > 1 or (value == -1).any():
                raise ModelError(f"{reader.op} {name}: a size depends on open lengths and on channels; {FIX_LENGTHS}")
            value = np.where(wrong, np.asarray(-1, dtype=value.dtype), value)
            moving = moving & ~wrong
        made = _mixed(result, nodes, name, place, source, value, moving)
    else:
        made = f"{name}/size_{place}"
        _add(result, nodes, const_node(made, np.asarray(value, dtype=actual.dtype)))
    data = [i for i, given in enumerate(reader.input) if not given.startswith("^")]
    reader.input[data[place]] = made


def _add(result: Any, nodes: dict[str, Any], node: Any) -> None:
    added = result.node.add()
    added.CopyFrom(node)
    nodes[node.name] = added


def _mixed(
    result: Any, nodes: dict[str, Any], name: str, place: int, source: str, value: np.ndarray, moving: np.ndarray
) -> str:
    """Elements that move with open lengths stay as the graph computes them, the others become constants."""
    made = f"{name}/size_{place}"
    producer = nodes[node_name(source)]
    dtype = tf.as_dtype(value.dtype).as_datatype_enum
    if producer.op == "Pack" and len(producer.input) >= value.size == producer.attr["N"].i:
        node = tf.compat.v1.NodeDef(name=made, op="Pack")
        for attribute in ("N", "T", "axis"):
            node.attr[attribute].CopyFrom(producer.attr[attribute])
        for index in range(value.size):
            if moving[index]:
                node.input.append(producer.input[index])
            else:
                _add(result, nodes, const_node(f"{made}_{index}", np.asarray(value[index], dtype=value.dtype)))
                node.input.append(f"{made}_{index}")
    else:
        _add(result, nodes, const_node(f"{made}_open", moving))
        _add(result, nodes, const_node(f"{made}_fixed", value))
        node = tf.compat.v1.NodeDef(name=made, op="SelectV2", input=[f"{made}_open", source, f"{made}_fixed"])
        node.attr["T"].type = dtype
    _add(result, nodes, node)
    return made


def _check(smaller: Any, analysis: GraphAnalysis, dead: np.ndarray) -> None:
    """Import the smaller graph and compare all shapes with the prediction."""
    bound = bind(smaller, analysis.outputs, {**_made_up(analysis), **analysis.sizes})
    for record in analysis.trace.records:
        for index, labels in enumerate(record.outputs):
            if labels.weight:
                continue  # a grouped filter's axes say more than its shape; the layer that reads it is compared
            found = bound.shape(f"{record.module}:{index}")
            expected = surviving_shape(labels, dead)
            if found is not None and found != expected:
                raise ModelError(
                    f"{record.name} {record.module}: its result has shape {list(found)} after the cut, "
                    f"{list(expected)} was predicted"
                )


def _made_up(analysis: GraphAnalysis) -> dict[str, list[int]]:
    nodes = {node.name: node for node in analysis.graph_def.node}
    return {name: [dim.size for dim in nodes[name].attr["shape"].shape.dim] for name, _ in analysis.trace.bound.unknown}
