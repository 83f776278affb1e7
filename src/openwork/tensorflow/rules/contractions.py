"""Convolutions, matrix products, einsum.

Filters are [taps.., in / groups, out]; the structural operators want [out, in / groups, taps..], so maps are
permuted on the way in and out. The number of groups is the quotient of channels, no attribute.
"""

from __future__ import annotations

import numpy as np

from openwork.graph import operators as op
from openwork.graph.costs import Cost
from openwork.graph.groups import Role
from openwork.graph.labels import Entry, LabelMap
from openwork.graph.operators.pointwise import axis_labels, pin_axes, separate
from openwork.tensorflow.rules._registry import Context, Record, Result, WeightUse, channel_axis, rule


def _channels_first(tensor: LabelMap, channel: int) -> LabelMap:
    rank = len(tensor.shape)
    return tensor if channel == 1 else op.permute(tensor, [0, rank - 1, *range(1, rank - 1)])


def _channels_back(tensor: LabelMap, channel: int) -> LabelMap:
    rank = len(tensor.shape)
    return tensor if channel == 1 else op.permute(tensor, [0, *range(2, rank), 1])


def _filter_first(weight: LabelMap) -> LabelMap:
    """[taps.., in, out] as [out, in, taps..]."""
    rank = len(weight.shape)
    return op.permute(weight, [rank - 1, rank - 2, *range(rank - 2)])


def _first_shape(shape: tuple[int, ...], channel: int) -> tuple[int, ...]:
    return shape if channel == 1 else (shape[0], shape[-1], *shape[1:-1])


@rule("Conv2D", "Conv3D")
def _convolution(ctx: Context) -> Result:
    x, weight = ctx.inputs[0], ctx.inputs[1]
    rank, channel = len(x.shape), ctx.channel
    groups = max(1, x.shape[channel] // weight.shape[-2])
    out = op.convolution(
        ctx.store,
        _channels_first(x, channel),
        _filter_first(weight),
        None,
        groups,
        False,
        _first_shape(ctx.shape, channel),
        ctx.parameters.get(1),
        inner_axis=rank - 2,
    )
    out = _channels_back(out, channel)
    ctx.weight = WeightUse(1, rank - 1, rank - 2, groups)
    depthwise = groups > 1 and weight.shape[-2] == 1
    taps = tuple((weight, axis) for axis in range(rank - 2))
    inner = () if depthwise else ((x, channel),)
    ctx.cost = Cost((*((out, axis) for axis in range(rank)), *inner, *taps), 1.0 if depthwise else float(groups))
    return out


@rule("DepthwiseConv2dNative")
def _depthwise(ctx: Context) -> Result:
    """Output channel c * multiplier + m reads input channel c: they are one unit."""
    store, x, weight = ctx.store, ctx.inputs[0], ctx.inputs[1]
    channel = ctx.channel
    x = pin_axes(store, x, [axis for axis in range(4) if axis not in (0, channel)], "moved over by a kernel")
    x = separate(store, x, [channel], "convolved over")
    weight = pin_axes(store, weight, [0, 1], "")
    weight = separate(store, weight, [2, 3], "convolution weight")
    incoming, inner, multiplied = (axis_labels(x, channel), axis_labels(weight, 2), axis_labels(weight, 3))
    multiplier = weight.shape[3]
    outgoing: np.ndarray | None = None
    if weight.shape[2] == 1:
        # One input channel: a plain convolution with `multiplier` filters.
        if multiplied is not None:
            store.mark(multiplied, Role.PRODUCES)
            outgoing = multiplied
    else:
        if multiplied is not None:
            store.freeze(multiplied, "")
        if incoming is not None and inner is not None:
            store.unify(incoming, inner)
            outgoing = np.repeat(inner, multiplier)
        elif inner is not None:
            store.freeze(inner, "reads channels that are fixed")
        elif incoming is not None:
            store.freeze(incoming, "convolved with an axis of fixed length")
    entries = [entry for entry in x.entries if channel not in entry.axes]
    if outgoing is not None:
        entries.append(Entry((channel,), outgoing, (channel,)))
    out = LabelMap(ctx.shape, tuple(entries))
    ctx.weight = WeightUse(1, 2, 2, x.shape[channel])
    ctx.cost = Cost((*((out, axis) for axis in range(4)), (weight, 0), (weight, 1)))
    return out


def _expected_sizes(record: Record, dead: np.ndarray) -> dict[int, np.ndarray]:
    sizes = record.values.get(0)
    shape = record.new_shape(0, dead)
    if sizes is None or len(sizes) != len(shape):
        return {}
    return {0: np.asarray(shape, dtype=sizes.dtype)}


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", values=(0,), expected=_expected_sizes)
def _transposed(ctx: Context) -> Result:
    x, weight = ctx.inputs[2], ctx.inputs[1]
    rank = len(x.shape)
    channel = channel_axis(ctx.node, rank)
    groups = max(1, ctx.shape[channel] // weight.shape[-2])
    out = op.convolution(
        ctx.store,
        _channels_first(x, channel),
        _filter_first(weight),
        None,
        groups,
        True,
        _first_shape(ctx.shape, channel),
        ctx.parameters.get(1),
        inner_axis=rank - 2,
    )
    out = _channels_back(out, channel)
    ctx.weight = WeightUse(1, rank - 2, rank - 1, groups)
    taps = tuple((weight, axis) for axis in range(rank - 2))
    ctx.cost = Cost((*((x, axis) for axis in range(rank)), (out, channel), *taps), float(groups))
    return out


def _product(ctx: Context, first: bool, second: bool) -> LabelMap:
    """Matrix product over the last two axes, batch axes broadcast on the left; operands may be transposed."""
    a, b = ctx.inputs[0], ctx.inputs[1]
    batch = [f"b{i}" for i in range(max(len(a.shape), len(b.shape)) - 2)]
    a_names = [*batch[len(batch) - len(a.shape) + 2 :], *(("k", "m") if first else ("m", "k"))]
    b_names = [*batch[len(batch) - len(b.shape) + 2 :], *(("n", "k") if second else ("k", "n"))]
    out = op.contract(ctx.store, a, b, (a_names, b_names, [*batch, "m", "n"]), ctx.shape)
    ctx.cost = Cost((*((out, axis) for axis in range(len(out.shape))), (a, a_names.index("k"))))
    if b.weight and len(b.shape) == 2:
        ctx.weight = WeightUse(1, 0 if second else 1, 1 if second else 0)
    elif a.weight and len(a.shape) == 2 and not b.weight:
        ctx.weight = WeightUse(0, 1 if first else 0, 0 if first else 1)
    return out


@rule("MatMul")
def _matmul(ctx: Context) -> Result:
    return _product(ctx, bool(ctx.attr("transpose_a")), bool(ctx.attr("transpose_b")))


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _batch_matmul(ctx: Context) -> Result:
    return _product(ctx, bool(ctx.attr("adj_x")), bool(ctx.attr("adj_y")))


def einsum_names(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """Index names of the operands and of the result; an ellipsis counts from the right."""
    left, _, right = equation.replace(" ", "").partition("->")
    names = []
    for term, rank in zip(left.split(","), ranks, strict=True):
        before, dots, after = term.partition("...")
        count = rank - len(before) - len(after)
        names.append([*before, *(f"...{i}" for i in range(count - 1, -1, -1) if dots), *after])
    before, dots, after = right.partition("...")
    widest = max(names, key=lambda found: sum(name.startswith("...") for name in found))
    return names, [*before, *(name for name in widest if dots and name.startswith("...")), *after]


@rule("Einsum")
def _einsum(ctx: Context) -> Result:
    names, out_names = einsum_names(ctx.attr("equation"), [len(tensor.shape) for tensor in ctx.inputs])
    if len(ctx.inputs) == 1:
        return _einsum_alone(ctx, names[0], out_names)
    if len(ctx.inputs) != 2 or any(len(set(found)) < len(found) for found in (*names, out_names)):
        for tensor in ctx.inputs:
            ctx.store.freeze_map(tensor, "this einsum is not understood")
        return LabelMap(ctx.shape)
    a, b = ctx.inputs
    out = op.contract(ctx.store, a, b, (names[0], names[1], out_names), ctx.shape)
    summed = [i for i, name in enumerate(names[0]) if name not in out_names]
    ctx.cost = Cost((*((out, axis) for axis in range(len(out.shape))), *((a, axis) for axis in summed)))
    return out


def _einsum_alone(ctx: Context, names: list[str], out_names: list[str]) -> LabelMap:
    x = ctx.inputs[0]
    if len(set(names)) < len(names) or not set(out_names) <= set(names):
        ctx.store.freeze_map(x, "this einsum is not understood")
        return LabelMap(ctx.shape)
    gone = [axis for axis, name in enumerate(names) if name not in out_names]
    kept = op.reduce(ctx.store, x, gone, False) if gone else x
    left = [name for name in names if name in out_names]
    return op.permute(kept, [left.index(name) for name in out_names])


@rule("BiasAdd", "BiasAddV1")
def _bias_add(ctx: Context) -> Result:
    return op.tie_vector(ctx.store, ctx.inputs[0], ctx.channel, ctx.inputs[1])


@rule("GatherV2", "ResourceGather", "Gather", values=(1, 2))
def _gather(ctx: Context) -> Result:
    table, indices = ctx.inputs[0], ctx.inputs[1]
    axis = ctx.axis(2, len(table.shape)) if len(ctx.inputs) > 2 else 0
    ctx.store.freeze_map(indices, "used as an index")
    if axis == 0 and table.weight and not ctx.attr("batch_dims", 0):
        for entry in table.entries:
            if entry.axes == (1,):
                ctx.store.mark(entry.labels, Role.PRODUCES)
        return op.embedding(ctx.store, table, indices.shape)
    if ctx.attr("batch_dims", 0):
        kept = pin_axes(ctx.store, table, range(len(table.shape)), "picked by data")
        return LabelMap(ctx.shape, (), kept.weight)
    kept = pin_axes(ctx.store, table, [axis], "positions are picked by an index")
    grow = len(indices.shape) - 1
    places = {a: a if a < axis else a + grow for a in range(len(table.shape)) if a != axis}
    return LabelMap(ctx.shape, tuple(entry.moved(places) for entry in kept.entries), kept.weight)
