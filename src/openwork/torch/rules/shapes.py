"""View, reshape, permute, expand, split, cat and their kin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from openwork.graph import operators as op
from openwork.graph.labels import LabelMap
from openwork.torch.rules._registry import Context, Result, rule
from openwork.torch.watch import Call

Shape = tuple[int, ...]


def _resolve(sizes: list[int], count: int) -> list[int]:
    """Fill in -1 by the number of elements; kept if that does not divide."""
    if sizes.count(-1) != 1:
        return sizes
    known = math.prod(size for size in sizes if size != -1)
    if known == 0 or count % known:
        return sizes
    return [count // known if size == -1 else size for size in sizes]


def _view_sizes(call: Call, shapes: list[Shape]) -> list[int]:
    sizes = call.get("size", call.get("shape"))
    return _resolve(list(sizes), math.prod(shapes[0]))


def _whole_output(record: Any, inputs: list[Shape], outputs: list[Shape], dead: np.ndarray) -> list[int]:
    return list(outputs[0])


@rule("aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "torch.reshape",
      sizes=_view_sizes, expected=_whole_output)  # fmt: skip
def _view(ctx: Context) -> Result:
    name = "self" if "self" in ctx.call.arguments else "input"
    x = ctx.map(name)
    if math.prod(x.shape) != math.prod(ctx.shape):  # view as another dtype
        return op.pin_axes(ctx.store, x, range(len(x.shape)), "viewed as another type").with_shape(ctx.shape)
    return op.reshape(ctx.store, x, ctx.shape)


@rule("aten.view.dtype")
def _view_dtype(ctx: Context) -> Result:
    x = ctx.map("self")
    if x.shape == ctx.shape:
        return x
    return op.pin_axes(ctx.store, x, range(len(x.shape)), "viewed as another type").with_shape(ctx.shape)


def _unflatten_sizes(call: Call, shapes: list[Shape]) -> list[int]:
    axis = call.get("dim") % len(shapes[0])
    return _resolve(list(call.get("sizes")), shapes[0][axis])


def _unflatten_expected(record: Any, inputs: list[Shape], outputs: list[Shape], dead: np.ndarray) -> list[int]:
    axis = record.call_numbers["dim"] % len(inputs[0])
    return list(outputs[0][axis : len(outputs[0]) - (len(inputs[0]) - axis - 1)])


@rule("torch.unflatten", sizes=_unflatten_sizes, expected=_unflatten_expected)
def _unflatten(ctx: Context) -> Result:
    return op.reshape(ctx.store, ctx.map("input"), ctx.shape)


@rule("torch.flatten")
def _flatten(ctx: Context) -> Result:
    return op.reshape(ctx.store, ctx.map("input"), ctx.shape)


@rule("aten.permute")
def _permute(ctx: Context) -> Result:
    x = ctx.map("self")
    return op.permute(x, [axis % len(x.shape) for axis in ctx.get("dims")])


@rule("aten.t", "aten.numpy_T")
def _t(ctx: Context) -> Result:
    x = ctx.map("self")
    return op.permute(x, list(range(len(x.shape)))[::-1])


@rule("aten.transpose", "aten.swapaxes")
def _transpose(ctx: Context) -> Result:
    x = ctx.map("self")
    axes = list(range(len(x.shape)))
    first, second = ctx.get("dim0") % len(axes), ctx.get("dim1") % len(axes)
    axes[first], axes[second] = axes[second], axes[first]
    return op.permute(x, axes)


@rule("aten.unsqueeze")
def _unsqueeze(ctx: Context) -> Result:
    x = ctx.map("self")
    axis = ctx.get("dim") % (len(x.shape) + 1)
    axes: list[int | None] = list(range(len(x.shape)))
    axes.insert(axis, None)
    return op.squeeze_to(x, axes, ctx.shape)


@rule("aten.squeeze")
def _squeeze(ctx: Context) -> Result:
    x = ctx.map("self")
    dims = ctx.get("dim")
    if dims is None:
        gone = {axis for axis, size in enumerate(x.shape) if size == 1}
    else:
        chosen = [dims] if isinstance(dims, int) else list(dims)
        gone = {axis % max(1, len(x.shape)) for axis in chosen}
        gone = {axis for axis in gone if x.shape and x.shape[axis] == 1}
    return op.squeeze_to(x, [axis for axis in range(len(x.shape)) if axis not in gone], ctx.shape)


def _expand_sizes(call: Call, shapes: list[Shape]) -> list[int]:
    sizes = list(call.get("size"))
    own = (1,) * (len(sizes) - len(shapes[0])) + tuple(shapes[0])
    return [own[i] if size == -1 else size for i, size in enumerate(sizes)]


@rule("aten.expand", sizes=_expand_sizes, expected=_whole_output)
def _expand(ctx: Context) -> Result:
    return op.expand(ctx.store, ctx.map("self"), ctx.shape)


@rule("aten.repeat")
def _repeat(ctx: Context) -> Result:
    return op.repeat(ctx.store, ctx.map("self"), list(ctx.get("repeats")))


@rule("torch.repeat_interleave")
def _repeat_interleave(ctx: Context) -> Result:
    x = ctx.map("input")
    return op.repeat_interleave(ctx.store, x, ctx.get("dim") % len(x.shape), ctx.get("repeats"))


@rule("aten.flip")
def _flip(ctx: Context) -> Result:
    x = ctx.map("self")
    return op.flip(x, [axis % len(x.shape) for axis in ctx.get("dims")])


@rule("aten.roll")
def _roll(ctx: Context) -> Result:
    x = ctx.map("self")
    dims = ctx.get("dims") or list(range(len(x.shape)))
    dims = [dims] if isinstance(dims, int) else dims
    return op.window(ctx.store, x, [axis % len(x.shape) for axis in dims], ctx.shape, "rolled along")


@rule("aten.cat", "aten.concat", "aten.concatenate")
def _cat(ctx: Context) -> Result:
    tensors = ctx.maps("tensors")
    rank = max(len(tensor.shape) for tensor in tensors)
    return op.concat(ctx.store, tensors, ctx.get("dim", 0) % rank)


@rule("aten.stack")
def _stack(ctx: Context) -> Result:
    tensors = ctx.maps("tensors")
    return op.stack(ctx.store, tensors, ctx.get("dim", 0) % (len(tensors[0].shape) + 1))


def _split_sizes(call: Call, shapes: list[Shape]) -> list[int]:
    sizes = call.get("split_sizes", call.get("split_size"))
    return [sizes] if isinstance(sizes, int) else list(sizes)


def _split_expected(record: Any, inputs: list[Shape], outputs: list[Shape], dead: np.ndarray) -> list[int]:
    axis = record.call_numbers.get("dim", 0) % len(inputs[0])
    lengths = [shape[axis] for shape in outputs]
    return lengths[:1] if "split_size" in record.call_numbers and len(record.sizes) == 1 else lengths


@rule("aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.split_copy",
      sizes=_split_sizes, expected=_split_expected)  # fmt: skip
def _split(ctx: Context) -> Result:
    x = ctx.map("self")
    axis = ctx.get("dim", 0) % len(x.shape)
    return op.split(ctx.store, x, axis, [shape[axis] for shape in ctx.shapes])


@rule("torch.chunk")
def _chunk(ctx: Context) -> Result:
    x = ctx.map("input")
    axis = ctx.get("dim", 0) % len(x.shape)
    return op.split(ctx.store, x, axis, [shape[axis] for shape in ctx.shapes])


@rule("aten.unbind")
def _unbind(ctx: Context) -> Result:
    x = ctx.map("self")
    axis = ctx.get("dim", 0) % len(x.shape)
    return [op.select(ctx.store, x, axis, index) for index in range(x.shape[axis])]


@rule("aten.select")
def _select(ctx: Context) -> Result:
    x = ctx.map("self")
    axis = ctx.get("dim") % len(x.shape)
    return op.select(ctx.store, x, axis, ctx.get("index") % x.shape[axis])


def _slice_bounds(start: int | None, stop: int | None, size: int) -> tuple[int, int]:
    first = 0 if start is None else start + size if start < 0 else start
    last = size if stop is None else stop + size if stop < 0 else stop
    first = min(max(first, 0), size)
    return first, min(max(last, first), size)


def _slice_sizes(call: Call, shapes: list[Shape]) -> list[int]:
    size = shapes[0][call.get("dim", 0) % len(shapes[0])]
    return list(_slice_bounds(call.get("start"), call.get("end"), size))


def _slice_expected(record: Any, inputs: list[Shape], outputs: list[Shape], dead: np.ndarray) -> list[int]:
    axis = record.call_numbers.get("dim", 0) % len(inputs[0])
    entry = record.inputs[0].entry(axis)
    if entry is None or record.call_numbers.get("step", 1) != 1:
        return list(record.sizes)
    start = int(record.sizes[0])
    if start:
        alive = np.moveaxis(~dead[entry.labels], entry.axes.index(axis), 0)[:start]
        start = int(alive.reshape(len(alive), -1).sum(axis=0).max(initial=0))
    return [start, start + outputs[0][axis]]


@rule("aten.slice", sizes=_slice_sizes, expected=_slice_expected)
def _slice(ctx: Context) -> Result:
    x = ctx.map("self")
    axis = ctx.get("dim", 0) % len(x.shape)
    start, stop = _slice_bounds(ctx.get("start"), ctx.get("end"), x.shape[axis])
    return op.slice_axis(ctx.store, x, axis, start, stop, ctx.get("step", 1))


def _pad_amounts(call: Call, shapes: list[Shape]) -> list[int]:
    return list(call.get("pad"))


def _expected_pad(record: Any, inputs: list[Shape], outputs: list[Shape], dead: np.ndarray) -> list[int]:
    amounts = list(record.sizes)
    rank = len(inputs[0])
    for i in range(len(amounts) // 2):
        axis = rank - 1 - i
        entry = record.outputs[0].entry(axis)
        before, after = amounts[2 * i], amounts[2 * i + 1]
        if entry is not None and len(entry.axes) == 1 and before >= 0 and after >= 0:
            alive = ~dead[entry.labels]
            amounts[2 * i] = int(alive[:before].sum())
            amounts[2 * i + 1] = int(alive[len(alive) - after :].sum())
    return amounts


@rule("aten.constant_pad_nd", "aten.pad", sizes=_pad_amounts, expected=_expected_pad)
def _constant_pad(ctx: Context) -> Result:
    x = ctx.map("self")
    before, after = [0] * len(x.shape), [0] * len(x.shape)
    amounts = list(ctx.get("pad"))
    for i in range(len(amounts) // 2):
        before[-1 - i], after[-1 - i] = amounts[2 * i], amounts[2 * i + 1]
    return op.pad(ctx.store, x, before, after)


@rule("aten.unfold")
def _unfold(ctx: Context) -> Result:
    x = ctx.map("self")
    axis = ctx.get("dimension") % len(x.shape)
    return op.window(ctx.store, x, [axis], ctx.shape, "unfolded along")


@rule("aten.im2col")
def _im2col(ctx: Context) -> Result:
    x = ctx.map("self")
    x = op.pin_axes(ctx.store, x, [len(x.shape) - 2, len(x.shape) - 1], "unfolded along")
    channel = len(x.shape) - 3
    times = ctx.shape[-2] // x.shape[channel]
    out = op.repeat_interleave(ctx.store, x.with_shape(x.shape), channel, times)
    return LabelMap(ctx.shape, out.entries, x.weight)


@rule("aten.col2im")
def _col2im(ctx: Context) -> Result:
    x = ctx.map("self")
    lead = x.shape[:-2]
    x = op.pin_axes(ctx.store, x, [len(x.shape) - 1], "folded along")
    channels = ctx.shape[len(lead)]
    split = op.reshape(ctx.store, x, (*lead, channels, x.shape[-2] // channels, x.shape[-1]))
    kept = op.pin_axes(ctx.store, split, [len(lead) + 1], "folded along")
    return LabelMap(ctx.shape, kept.entries, x.weight)


@rule("aten.pixel_shuffle")
def _pixel_shuffle(ctx: Context) -> Result:
    x = ctx.map("self")
    rank = len(x.shape)
    channels, factor = ctx.shape[rank - 3], ctx.get("upscale_factor")
    x = op.pin_axes(ctx.store, x, [rank - 2, rank - 1], "moved to space")
    split = op.reshape(ctx.store, x, (*x.shape[: rank - 3], channels, factor * factor, *x.shape[rank - 2 :]))
    kept = op.pin_axes(ctx.store, split, [rank - 2], "moved to space")
    return LabelMap(ctx.shape, kept.entries, x.weight)


@rule("aten.pixel_unshuffle")
def _pixel_unshuffle(ctx: Context) -> Result:
    x = ctx.map("self")
    rank = len(x.shape)
    x = op.pin_axes(ctx.store, x, [rank - 2, rank - 1], "moved to channels")
    out = op.repeat_interleave(ctx.store, x, rank - 3, ctx.get("downscale_factor") ** 2)
    return LabelMap(ctx.shape, out.entries, x.weight)


@rule("aten.channel_shuffle", "aten.native_channel_shuffle")
def _channel_shuffle(ctx: Context) -> Result:
    x = ctx.map("self")
    groups, channels = ctx.get("groups"), x.shape[1]
    split = op.reshape(ctx.store, x, (x.shape[0], groups, channels // groups, *x.shape[2:]))
    axes = [0, 2, 1, *range(3, len(split.shape))]
    return op.reshape(ctx.store, op.permute(split, axes), x.shape)
