"""Reshape, transpose, concatenate, split, slice, pad, tile and their kin.

What such an operator is told of sizes (targets, begins, paddings) comes from the graph; where it speaks of an
axis that loses channels, `expected` says what it must be afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from openwork.graph import operators as op
from openwork.graph.labels import LabelMap
from openwork.graph.sizes import surviving_shape
from openwork.tensorflow.rules._registry import Context, Record, Result, rule


def _like(template: np.ndarray, values: object) -> np.ndarray:
    return np.asarray(values, dtype=template.dtype).reshape(template.shape)


def _expected_target(record: Record, dead: np.ndarray) -> dict[int, np.ndarray]:
    given = record.values.get(1)
    if given is None:
        return {}
    shape = record.new_shape(0, dead)
    return {1: _like(given, [-1 if stated == -1 else size for stated, size in zip(given, shape, strict=True)])}


@rule("Reshape", values=(1,), expected=_expected_target)
def _reshape(ctx: Context) -> Result:
    x = ctx.inputs[0]
    if math.prod(x.shape) != math.prod(ctx.shape):
        ctx.store.freeze_map(x, "reshaped to a size that depends on data")
        return LabelMap(ctx.shape)
    return op.reshape(ctx.store, x, ctx.shape)


@rule("Squeeze")
def _squeeze(ctx: Context) -> Result:
    x = ctx.inputs[0]
    rank = len(x.shape)
    given = [axis % max(1, rank) for axis in ctx.attr("squeeze_dims", ctx.attr("axis", [])) or []]
    gone = set(given) or {axis for axis, size in enumerate(x.shape) if size == 1}
    return op.squeeze_to(x, [axis for axis in range(rank) if axis not in gone], ctx.shape)


@rule("ExpandDims", values=(1,))
def _expand_dims(ctx: Context) -> Result:
    x = ctx.inputs[0]
    axes: list[int | None] = list(range(len(x.shape)))
    axes.insert(int(np.ravel(ctx.value(1, "its axis"))[0]) % (len(x.shape) + 1), None)
    return op.squeeze_to(x, axes, ctx.shape)


@rule("Transpose", "ConjugateTranspose", values=(1,))
def _transpose(ctx: Context) -> Result:
    x = ctx.inputs[0]
    return op.permute(x, [int(axis) % len(x.shape) for axis in ctx.value(1, "its order of axes")])


@rule("ConcatV2", values=(-1,))
def _concat(ctx: Context) -> Result:
    tensors = ctx.inputs[:-1]
    return op.concat(ctx.store, tensors, ctx.axis(-1, len(tensors[0].shape)))


@rule("Concat", values=(0,))
def _old_concat(ctx: Context) -> Result:
    tensors = ctx.inputs[1:]
    return op.concat(ctx.store, tensors, ctx.axis(0, len(tensors[0].shape)))


@rule("Pack")
def _pack(ctx: Context) -> Result:
    return op.stack(ctx.store, ctx.inputs, int(ctx.attr("axis", 0)) % len(ctx.shape))


@rule("Unpack")
def _unpack(ctx: Context) -> Result:
    x = ctx.inputs[0]
    axis = int(ctx.attr("axis", 0)) % len(x.shape)
    return [op.select(ctx.store, x, axis, index) for index in range(x.shape[axis])]


@rule("Split", values=(0,))
def _split(ctx: Context) -> Result:
    x = ctx.inputs[1]
    axis = ctx.axis(0, len(x.shape))
    return op.split(ctx.store, x, axis, [shape[axis] for shape in ctx.shapes])


def _expected_parts(record: Record, dead: np.ndarray) -> dict[int, np.ndarray]:
    given, axis = record.values.get(1), record.values.get(2)
    if given is None or axis is None:
        return {}
    place = int(axis) % len(record.inputs[0].shape)
    sizes = [record.new_shape(index, dead)[place] for index in range(len(record.outputs))]
    return {1: _like(given, [-1 if stated == -1 else size for stated, size in zip(given, sizes, strict=True)])}


@rule("SplitV", values=(1, 2), expected=_expected_parts)
def _split_v(ctx: Context) -> Result:
    x = ctx.inputs[0]
    axis = ctx.axis(2, len(x.shape))
    return op.split(ctx.store, x, axis, [shape[axis] for shape in ctx.shapes])


@dataclass(frozen=True)
class _Part:
    """What a strided slice does: one axis of the input, or a new one (axis -1)."""

    axis: int
    place: int
    start: int
    stop: int
    step: int
    picks: bool = False


def strided_parts(
    attributes: dict[str, int], shape: tuple[int, ...], begin: np.ndarray, end: np.ndarray, strides: np.ndarray
) -> list[_Part]:
    """What a StridedSlice with these masks does to each axis; `place` is the number in begin and end."""
    count = len(begin)
    new = [i for i in range(count) if attributes["new_axis_mask"] >> i & 1]
    ellipsis = next((i for i in range(count) if attributes["ellipsis_mask"] >> i & 1), None)
    spoken = count - len(new) - (ellipsis is not None)
    parts: list[_Part] = []
    axis = 0

    def whole(number: int) -> None:
        nonlocal axis
        for _ in range(number):
            parts.append(_Part(axis, -1, 0, shape[axis], 1))
            axis += 1

    for place in range(count):
        if place == ellipsis:
            whole(len(shape) - spoken)
        elif place in new:
            parts.append(_Part(-1, place, 0, 1, 1))
        else:
            size, step = shape[axis], int(strides[place])
            if attributes["shrink_axis_mask"] >> place & 1:
                index = int(begin[place]) % size
                parts.append(_Part(axis, place, index, index + 1, 1, picks=True))
            else:
                bounds = slice(
                    None if attributes["begin_mask"] >> place & 1 else int(begin[place]),
                    None if attributes["end_mask"] >> place & 1 else int(end[place]),
                    step,
                ).indices(size)
                parts.append(_Part(axis, place, bounds[0], bounds[1], step))
            axis += 1
    whole(len(shape) - axis)
    return parts


_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def _alive_before(tensor: LabelMap, axis: int, start: int, dead: np.ndarray) -> int:
    """Positions below `start` that stay."""
    entry = tensor.entry(axis)
    if entry is None or not start:
        return start
    alive = np.moveaxis(~dead[entry.labels], entry.axes.index(axis), 0)[:start]
    return int(alive.reshape(len(alive), -1).sum(axis=0).max(initial=0))


def _expected_bounds(record: Record, dead: np.ndarray) -> dict[int, np.ndarray]:
    x = record.inputs[0]
    if not all(place in record.values for place in (1, 2, 3)):
        return {}
    begin, end, strides = (np.array(record.values[place]) for place in (1, 2, 3))
    masks = {name: record.node.attr[name].i for name in _MASKS}
    new_input, out_axis = surviving_shape(x, dead), 0
    out_shape = record.new_shape(0, dead)
    for part in strided_parts(masks, x.shape, begin, end, strides):
        if part.axis >= 0 and part.place >= 0 and new_input[part.axis] != x.shape[part.axis] and not part.picks:
            start = _alive_before(x, part.axis, part.start, dead)
            if not masks["begin_mask"] >> part.place & 1:
                begin[part.place] = start
            if not masks["end_mask"] >> part.place & 1:
                end[part.place] = start + out_shape[out_axis]
        out_axis += not part.picks
    return {1: begin, 2: end}


@rule("StridedSlice", values=(1, 2, 3), expected=_expected_bounds)
def _strided_slice(ctx: Context) -> Result:
    x = ctx.inputs[0]
    bounds = [ctx.value(place, "its bounds") for place in (1, 2, 3)]
    parts = strided_parts({name: int(ctx.attr(name, 0)) for name in _MASKS}, x.shape, *bounds)
    gone: list[int] = []
    for part in parts:
        if part.axis < 0:
            continue
        if part.picks:
            gone.append(part.axis)
        elif part.step < 0:
            x = op.pin_axes(ctx.store, x, [part.axis], "sliced backwards")
            length = len(range(part.start, part.stop, part.step))
            x = x.with_shape([length if axis == part.axis else size for axis, size in enumerate(x.shape)])
        else:
            x = op.slice_axis(ctx.store, x, part.axis, part.start, max(part.start, part.stop), part.step)
    starts = {part.axis: part.start for part in parts if part.picks}
    for axis in sorted(gone, reverse=True):
        x = op.select(ctx.store, x, axis, starts[axis])
    left = iter(range(len(x.shape)))
    axes = [None if part.axis < 0 else next(left) for part in parts if not part.picks]
    return op.squeeze_to(x, axes, ctx.shape)


def _expected_slice(record: Record, dead: np.ndarray) -> dict[int, np.ndarray]:
    if not all(place in record.values for place in (1, 2)):
        return {}
    begin, size = record.values[1], record.values[2]
    starts = [_alive_before(record.inputs[0], axis, int(start), dead) for axis, start in enumerate(begin)]
    shape = record.new_shape(0, dead)
    return {
        1: _like(begin, starts),
        2: _like(size, [-1 if stated == -1 else length for stated, length in zip(size, shape, strict=True)]),
    }


@rule("Slice", values=(1, 2), expected=_expected_slice)
def _slice(ctx: Context) -> Result:
    x = ctx.inputs[0]
    for axis, start in enumerate(ctx.value(1, "where it begins")):
        x = op.slice_axis(ctx.store, x, axis, int(start), int(start) + ctx.shape[axis])
    return x


def _expected_padding(record: Record, dead: np.ndarray) -> dict[int, np.ndarray]:
    given = record.values.get(1)
    if given is None:
        return {}
    amounts = np.array(given)
    for axis, (before, after) in enumerate(given.tolist()):
        entry = record.outputs[0].entry(axis)
        if entry is not None and len(entry.axes) == 1 and (before or after):
            alive = ~dead[entry.labels]
            amounts[axis] = alive[:before].sum(), alive[len(alive) - after :].sum()
    return {1: amounts}


@rule("Pad", "PadV2", values=(1,), expected=_expected_padding)
def _pad(ctx: Context) -> Result:
    amounts = ctx.value(1, "its padding").tolist()
    return op.pad(ctx.store, ctx.inputs[0], [before for before, _ in amounts], [after for _, after in amounts])


@rule("MirrorPad", values=(1,))
def _mirror_pad(ctx: Context) -> Result:
    amounts = ctx.value(1, "its padding").tolist()
    grown = [axis for axis, pair in enumerate(amounts) if any(pair)]
    return op.window(ctx.store, ctx.inputs[0], grown, ctx.shape, "mirrored along")


@rule("Tile", values=(1,))
def _tile(ctx: Context) -> Result:
    return op.repeat(ctx.store, ctx.inputs[0], [int(count) for count in ctx.value(1, "how often it repeats")])


def _expected_wide(record: Record, dead: np.ndarray) -> dict[int, np.ndarray]:
    given = record.values.get(1)
    return {} if given is None else {1: _like(given, record.new_shape(0, dead))}


@rule("BroadcastTo", values=(1,), expected=_expected_wide)
def _broadcast(ctx: Context) -> Result:
    return op.expand(ctx.store, ctx.inputs[0], ctx.shape)


def _first(ctx: Context) -> tuple[LabelMap, bool]:
    x = ctx.inputs[0]
    first = ctx.channel == 1
    return (x if first else op.permute(x, [0, 3, 1, 2])), first


def _back(tensor: LabelMap, first: bool) -> LabelMap:
    return tensor if first else op.permute(tensor, [0, 2, 3, 1])


def _vector_format(ctx: Context) -> bool:
    """NCHW_VECT_C keeps four channels in an axis of their own."""
    return len(ctx.inputs[0].shape) != 4


@rule("SpaceToDepth")
def _space_to_depth(ctx: Context) -> Result:
    """Result channel b * C + c is channel c of the input."""
    if _vector_format(ctx):
        return op.pin_axes(ctx.store, ctx.inputs[0], range(5), "packed channels").with_shape(ctx.shape)
    x, first = _first(ctx)
    block = int(ctx.attr("block_size"))
    x = op.pin_axes(ctx.store, x, [2, 3], "moved to channels")
    wide = op.repeat(ctx.store, x, [1, block * block, 1, 1])
    shape = (*wide.shape[:2], x.shape[2] // block, x.shape[3] // block)
    return _back(wide.with_shape(shape), first)


@rule("DepthToSpace")
def _depth_to_space(ctx: Context) -> Result:
    """Channel b * C + c of the input goes to channel c: all blocks b lose the same c."""
    if _vector_format(ctx):
        return op.pin_axes(ctx.store, ctx.inputs[0], range(5), "packed channels").with_shape(ctx.shape)
    x, first = _first(ctx)
    block = int(ctx.attr("block_size"))
    channels = x.shape[1] // (block * block)
    x = op.pin_axes(ctx.store, x, [2, 3], "moved to space")
    split = op.reshape(ctx.store, x, (x.shape[0], block * block, channels, *x.shape[2:]))
    kept = op.pin_axes(ctx.store, split, [1], "moved to space")
    out = op.squeeze_to(kept, [0, 2, 3, 4], (x.shape[0], channels, *x.shape[2:]))
    return _back(out.with_shape((x.shape[0], channels, x.shape[2] * block, x.shape[3] * block)), first)


@rule("SpaceToBatchND", "BatchToSpaceND", values=(1,))
def _batches(ctx: Context) -> Result:
    space = len(ctx.value(1, "its block"))
    return op.window(ctx.store, ctx.inputs[0], list(range(space + 1)), ctx.shape, "moved to the batch")


@rule("SpaceToBatch", "BatchToSpace")
def _old_batches(ctx: Context) -> Result:
    return op.window(ctx.store, ctx.inputs[0], [0, 1, 2], ctx.shape, "moved to the batch")


@rule("ExtractImagePatches")
def _patches(ctx: Context) -> Result:
    """Result channel tap * C + c is channel c of the input."""
    x = op.pin_axes(ctx.store, ctx.inputs[0], [1, 2], "unfolded along")
    wide = op.repeat(ctx.store, x, [1, 1, 1, ctx.shape[3] // x.shape[3]])
    return wide.with_shape(ctx.shape)
