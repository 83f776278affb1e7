"""Normalisation, pooling, reductions, softmax, resampling, ordering."""

from __future__ import annotations

import numpy as np

from openwork.graph import operators as op
from openwork.graph.labels import LabelMap
from openwork.graph.operators.pointwise import pin_axes
from openwork.tensorflow.rules._registry import Context, Result, rule


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "_FusedBatchNormEx")
def _batch_norm(ctx: Context) -> Result:
    """Scale, offset, mean, variance are tied to the channels; in training the latter two may be empty."""
    vectors = [vector for vector in ctx.inputs[1:5] if vector.shape != (0,)]
    out = op.batch_norm(ctx.store, ctx.inputs[0], vectors, ctx.channel)
    entry = out.entry(ctx.channel)
    statistics = [
        LabelMap(shape, (entry.moved({ctx.channel: 0}),))
        if entry is not None and len(entry.axes) == 1 and shape == (out.shape[ctx.channel],)
        else LabelMap(shape)
        for shape in ctx.shapes[1:]
    ]
    return [out, *statistics]


@rule("BatchNormWithGlobalNormalization")
def _old_batch_norm(ctx: Context) -> Result:
    return op.batch_norm(ctx.store, ctx.inputs[0], ctx.inputs[1:5], len(ctx.inputs[0].shape) - 1)


def _moved_over(ctx: Context, sizes: list[str], why: str) -> LabelMap:
    """A window over all axes but batch and channels; over channels too where the kernel is longer there."""
    x = ctx.inputs[0]
    rank = len(x.shape)
    axes = [axis for axis in range(1, rank) if axis != ctx.channel]
    for name in sizes:
        given = ctx.attr(name)
        if given and given[ctx.channel] != 1:
            axes.append(ctx.channel)
    return op.window(ctx.store, x, axes, ctx.shape, why)


@rule("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "MaxPoolWithArgmax")
def _pool(ctx: Context) -> Result:
    out = _moved_over(ctx, ["ksize", "strides"], "moved over by a window")
    if len(ctx.shapes) > 1:
        # Places of the largest values count channels too.
        return [out, LabelMap(ctx.shapes[1])]
    return out


@rule("MaxPoolV2", values=(1, 2))
def _pool_v2(ctx: Context) -> Result:
    x = ctx.inputs[0]
    axes = [axis for axis in range(1, len(x.shape)) if axis != ctx.channel]
    if int(ctx.value(1, "its window")[ctx.channel]) != 1:
        axes.append(ctx.channel)
    return op.window(ctx.store, x, axes, ctx.shape, "moved over by a window")


@rule("Dilation2D")
def _dilation(ctx: Context) -> Result:
    out = op.window(ctx.store, ctx.inputs[0], [1, 2], ctx.shape, "moved over by a kernel")
    taps = pin_axes(ctx.store, ctx.inputs[1], [0, 1], "")
    vector = LabelMap((taps.shape[2],), tuple(entry.moved({2: 0}) for entry in taps.entries), taps.weight)
    return op.tie_vector(ctx.store, out, 3, vector)


@rule("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea", "ScaleAndTranslate", "CropAndResize",
      "ExtractGlimpse")  # fmt: skip
def _resize(ctx: Context) -> Result:
    return op.window(ctx.store, ctx.inputs[0], [0, 1, 2] if ctx.node.op == "CropAndResize" else [1, 2], ctx.shape,
                     "resampled along")  # fmt: skip


@rule("LRN")
def _local_response(ctx: Context) -> Result:
    return op.pin_axes(ctx.store, ctx.inputs[0], [3], "mixed with neighbouring channels")


def _reduced_axes(ctx: Context) -> list[int]:
    rank = len(ctx.inputs[0].shape)
    given = np.atleast_1d(ctx.value(1, "what it reduces"))
    return sorted({int(axis) % max(1, rank) for axis in given})


@rule("Mean", "Sum", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm", values=(1,))
def _reduce(ctx: Context) -> Result:
    return op.reduce(ctx.store, ctx.inputs[0], _reduced_axes(ctx), bool(ctx.attr("keep_dims", False)))


@rule("L2Loss")
def _loss(ctx: Context) -> Result:
    return op.reduce(ctx.store, ctx.inputs[0], range(len(ctx.inputs[0].shape)), False)


@rule("ArgMax", "ArgMin", values=(1,))
def _place_of(ctx: Context) -> Result:
    x = ctx.inputs[0]
    axis = ctx.axis(1, len(x.shape))
    x = op.pin_axes(ctx.store, x, [axis], "order along a channel axis matters")
    return op.reduce(ctx.store, x, [axis], False)


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", values=(1,))
def _cumulated(ctx: Context) -> Result:
    x = ctx.inputs[0]
    return op.pin_axes(ctx.store, x, [ctx.axis(1, len(x.shape))], "order along a channel axis matters")


@rule("TopK", "TopKV2")
def _top(ctx: Context) -> Result:
    x = op.pin_axes(ctx.store, ctx.inputs[0], [len(ctx.inputs[0].shape) - 1], "order along a channel axis matters")
    return [x.with_shape(shape) for shape in ctx.shapes]


@rule("Softmax", "LogSoftmax")
def _softmax(ctx: Context) -> Result:
    return op.mixed_along(ctx.store, ctx.inputs[0], [len(ctx.inputs[0].shape) - 1])


@rule("ReverseV2", values=(1,))
def _reverse(ctx: Context) -> Result:
    x = ctx.inputs[0]
    return op.flip(x, [int(axis) % len(x.shape) for axis in ctx.value(1, "what it reverses")])


@rule("Roll", values=(2,))
def _roll(ctx: Context) -> Result:
    x = ctx.inputs[0]
    axes = [int(axis) % len(x.shape) for axis in np.atleast_1d(ctx.value(2, "its axes"))]
    return op.window(ctx.store, x, axes, ctx.shape, "rolled along")
