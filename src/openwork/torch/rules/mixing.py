"""Norms, reductions, softmax, pooling, resampling, indexing, creation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from openwork.graph import operators as op
from openwork.graph.groups import Role
from openwork.graph.labels import LabelMap
from openwork.torch.rules._registry import Context, Result, rule
from openwork.torch.watch import Call

Shape = tuple[int, ...]


@rule(
    "torch.batch_norm",
    "aten.native_batch_norm",
    "aten._native_batch_norm_legit",
    "aten._native_batch_norm_legit_no_training",
    "aten._batch_norm_with_update",
    "aten._batch_norm_no_update",
    "aten.cudnn_batch_norm",
    "aten.batch_norm",
)
def _batch_norm(ctx: Context) -> Result:
    names = ("weight", "bias", "running_mean", "running_var")
    return op.batch_norm(ctx.store, ctx.map("input"), [ctx.optional(name) for name in names])


@rule("torch.instance_norm")
def _instance_norm(ctx: Context) -> Result:
    names = ("weight", "bias", "running_mean", "running_var")
    return op.batch_norm(ctx.store, ctx.map("input"), [ctx.optional(name) for name in names])


def _normalized_shape(call: Call, shapes: list[Shape]) -> list[int]:
    shape = call.get("normalized_shape")
    return [shape] if isinstance(shape, int) else list(shape)


def _expected_normalized(record: Any, inputs: list[Shape], outputs: list[Shape], dead: np.ndarray) -> list[int]:
    shape = record.call_numbers["normalized_shape"]
    count = 1 if isinstance(shape, int) else len(shape)
    return list(inputs[0][len(inputs[0]) - count :])


@rule("torch.layer_norm", "aten.native_layer_norm", "torch.rms_norm", "aten._fused_rms_norm", "aten.rms_norm",
      sizes=_normalized_shape, expected=_expected_normalized)  # fmt: skip
def _layer_norm(ctx: Context) -> Result:
    x = ctx.map("input")
    shape = ctx.get("normalized_shape")
    count = 1 if isinstance(shape, int) else len(shape)
    axes = range(len(x.shape) - count, len(x.shape))
    return op.layer_norm(ctx.store, x, list(axes), [ctx.optional("weight"), ctx.optional("bias")])


def _group_sizes(call: Call, shapes: list[Shape]) -> list[int]:
    return [int(call.get("num_groups"))]


def _expected_num_groups(record: Any, inputs: list[Shape], outputs: list[Shape], dead: np.ndarray) -> list[int]:
    groups = int(record.call_numbers["num_groups"])
    return [inputs[0][1] if groups == record.inputs[0].shape[1] else groups]


@rule("torch.group_norm", sizes=_group_sizes, expected=_expected_num_groups)
def _group_norm(ctx: Context) -> Result:
    vectors = [ctx.optional("weight"), ctx.optional("bias")]
    return op.group_norm(ctx.store, ctx.map("input"), ctx.get("num_groups"), vectors)


@rule("aten.native_group_norm")
def _native_group_norm(ctx: Context) -> Result:
    vectors = [ctx.optional("weight"), ctx.optional("bias")]
    return op.group_norm(ctx.store, ctx.map("input"), ctx.get("group"), vectors)


def _axes(ctx: Context, x: LabelMap) -> list[int]:
    dims = ctx.get("dim")
    if dims is None or dims == []:
        return list(range(len(x.shape)))
    return sorted({axis % max(1, len(x.shape)) for axis in ([dims] if isinstance(dims, int) else dims)})


@rule("aten.sum", "aten.mean", "aten.var", "aten.std", "aten.var_mean", "aten.std_mean", "aten.norm",
      "aten.linalg_vector_norm", "aten.amax", "aten.amin", "aten.logsumexp", "aten.prod", "aten.nansum",
      "aten.all", "aten.any", "aten.max", "aten.min", "aten.aminmax", "aten.count_nonzero")  # fmt: skip
def _reduce(ctx: Context) -> Result:
    x = ctx.map("self")
    other = ctx.get("other")
    if isinstance(other, torch.Tensor):  # max(a, b), min(a, b)
        return op.pointwise(ctx.store, ctx.all_maps, ctx.shape)
    out = op.reduce(ctx.store, x, _axes(ctx, x), bool(ctx.get("keepdim", False)))
    return [out] * len(ctx.shapes)


@rule("aten.argmax", "aten.argmin", "aten.sort", "aten.topk", "aten.cumsum", "aten.cumprod", "aten.kthvalue",
      "aten.median", "aten.argsort", "aten.mode", "aten.logcumsumexp", "aten.cummax", "aten.cummin")  # fmt: skip
def _ordered(ctx: Context) -> Result:
    x = ctx.map("self")
    axes = _axes(ctx, x) if ctx.get("dim") is not None or "dim" in ctx.call.arguments else [-1 % len(x.shape)]
    x = op.pin_axes(ctx.store, x, axes, "order along a channel axis matters")
    if len(ctx.shape) == len(x.shape):
        return [x.with_shape(shape) for shape in ctx.shapes]
    out = op.reduce(ctx.store, x, axes, False)
    return [out.with_shape(shape) for shape in ctx.shapes]


@rule("aten._softmax", "aten._log_softmax", "aten.softmax", "aten.log_softmax", "aten._safe_softmax")
def _softmax(ctx: Context) -> Result:
    x = ctx.map("self")
    return op.mixed_along(ctx.store, x, [ctx.get("dim") % max(1, len(x.shape))])


@rule("aten._weight_norm_interface")
def _weight_norm(ctx: Context) -> Result:
    direction, length = ctx.map("v"), ctx.map("g")
    axis = ctx.get("dim", 0) % len(direction.shape)
    mixed = op.mixed_along(ctx.store, direction, [a for a in range(len(direction.shape)) if a != axis])
    return op.pointwise(ctx.store, [mixed, length], ctx.shape)


@rule("aten.glu")
def _glu(ctx: Context) -> Result:
    x = ctx.map("self")
    axis = ctx.get("dim", -1) % len(x.shape)
    first, second = op.split(ctx.store, x, axis, [x.shape[axis] // 2] * 2)
    return op.pointwise(ctx.store, [first, second], ctx.shape)


@rule("aten.prelu", "aten._prelu_kernel")
def _prelu(ctx: Context) -> Result:
    x, weight = ctx.map("self"), ctx.map("weight")
    if weight.shape and len(weight.shape) == 1 and len(x.shape) > 1:
        return op.tie_vector(ctx.store, x, 1, weight)
    return op.pointwise(ctx.store, [x, weight], ctx.shape)


_WINDOWS_1D = ("aten.max_pool1d", "aten.avg_pool1d", "aten.adaptive_avg_pool1d", "aten.adaptive_max_pool1d",
               "aten.upsample_linear1d", "aten.upsample_nearest1d", "aten.reflection_pad1d",
               "aten.replication_pad1d", "aten._upsample_nearest_exact1d")  # fmt: skip
_WINDOWS_2D = ("aten.max_pool2d", "aten.max_pool2d_with_indices", "aten.avg_pool2d", "aten.adaptive_avg_pool2d",
               "aten._adaptive_avg_pool2d", "aten.adaptive_max_pool2d", "aten.upsample_bilinear2d",
               "aten.upsample_bicubic2d", "aten.upsample_nearest2d", "aten.reflection_pad2d",
               "aten.replication_pad2d", "aten._upsample_bilinear2d_aa", "aten._upsample_bicubic2d_aa",
               "aten._upsample_nearest_exact2d", "aten.mkldnn_max_pool2d", "aten.max_unpool2d",
               "aten.fractional_max_pool2d", "aten.mkldnn_adaptive_avg_pool2d")  # fmt: skip
_WINDOWS_3D = ("aten.max_pool3d", "aten.max_pool3d_with_indices", "aten.avg_pool3d", "aten.adaptive_avg_pool3d",
               "aten._adaptive_avg_pool3d", "aten.adaptive_max_pool3d", "aten.upsample_trilinear3d",
               "aten.upsample_nearest3d", "aten.reflection_pad3d", "aten.replication_pad3d",
               "aten._upsample_nearest_exact3d")  # fmt: skip


def _window(count: int | None) -> Any:
    """`count` last axes are moved over; None: all behind the channels."""

    def label(ctx: Context) -> Result:
        x = ctx.map("self" if "self" in ctx.call.arguments else "input")
        rank = len(x.shape)
        axes = list(range(2 if count is None else rank - count, rank))
        out = op.window(ctx.store, x, axes, ctx.shape, "moved over by a window")
        return [out.with_shape(shape) for shape in ctx.shapes]

    return label


rule("torch.interpolate")(_window(None))
rule("torch.adaptive_avg_pool2d")(_window(2))
rule("torch.adaptive_avg_pool3d")(_window(3))
for _names, _count in ((_WINDOWS_1D, 1), (_WINDOWS_2D, 2), (_WINDOWS_3D, 3)):
    rule(*_names)(_window(_count))


@rule("aten.grid_sampler_2d", "aten.grid_sampler_3d", "aten.grid_sampler")
def _grid_sampler(ctx: Context) -> Result:
    x = ctx.map("input")
    ctx.store.freeze_map(ctx.map("grid"), "sampling positions are not channels")
    return op.window(ctx.store, x, list(range(2, len(x.shape))), ctx.shape, "sampled along")


@rule("aten.embedding")
def _embedding(ctx: Context) -> Result:
    weight, indices = ctx.map("weight"), ctx.map("indices")
    ctx.store.freeze_map(indices, "used as an index")
    for entry in weight.entries:
        if entry.axes == (1,) and weight.weight:
            ctx.store.mark(entry.labels, Role.PRODUCES)
    return op.embedding(ctx.store, weight, indices.shape)


@rule("aten.index_select", "aten.gather", "aten.take_along_dim")
def _index_select(ctx: Context) -> Result:
    x = ctx.map("self")
    axis = ctx.get("dim") % max(1, len(x.shape))
    if not ctx.call.name.startswith("aten.index_select"):
        # The index is as large as the result; where it was expanded it is uniform, so channels may go.
        index = ctx.map("index")
        axes = [a for a in range(len(x.shape)) if a != axis and x.shape[a] != index.shape[a]]
        x = op.pin_axes(ctx.store, x, [axis, *axes], "gathered by data").with_shape(ctx.shape)
        return op.pointwise(ctx.store, [x, op.pin_axes(ctx.store, index, [axis], "")], ctx.shape)
    return op.window(ctx.store, x, [axis], ctx.shape, "picked by data")


@rule("aten.index", "aten._unsafe_index")
def _index(ctx: Context) -> Result:
    x = ctx.map("self")
    indices = list(ctx.get("indices"))
    used = [axis for axis, index in enumerate(indices) if index is not None]
    for axis in used:
        ctx.store.freeze_map(ctx.source.map_of(indices[axis]), "used as an index")
    if any(indices[axis].dtype in (torch.bool, torch.uint8) for axis in used):
        return op.pin_axes(ctx.store, x, range(len(x.shape)), "indexed by a mask").with_shape(ctx.shape)
    x = op.pin_axes(ctx.store, x, used, "picked by data")
    rank = max(len(indices[axis].shape) for axis in used)
    adjacent = used == list(range(used[0], used[-1] + 1))
    at = used[0] if adjacent else 0
    left = [axis for axis in range(len(x.shape)) if axis not in used]
    order: list[int | None] = list(left)
    order[at:at] = [None] * rank
    places = {axis: place for place, axis in enumerate(order) if axis is not None}
    return LabelMap(ctx.shape, tuple(entry.moved(places) for entry in x.entries), x.weight)


@rule("aten.tril", "aten.triu", "aten.diagonal", "aten.diag_embed", "aten.as_strided", "aten.rot90")
def _positional(ctx: Context) -> Result:
    x = ctx.map("self")
    if ctx.call.name == "aten.as_strided_.default" and ctx.shape == x.shape:
        return x  # torch gives a fresh result another memory format
    return op.pin_axes(ctx.store, x, range(len(x.shape)), "positions matter to this operator").with_shape(ctx.shape)


def _creation_size(call: Call, shapes: list[Shape]) -> list[int]:
    return list(call.get("size"))


def _creation_expected(record: Any, inputs: list[Shape], outputs: list[Shape], dead: np.ndarray) -> list[int]:
    return list(outputs[0])


@rule("aten.zeros", "aten.ones", "aten.full", "aten.empty", "aten.rand", "aten.randn", "aten.new_zeros",
      "aten.new_ones", "aten.new_full", "aten.new_empty", "aten.empty_strided", "aten.new_empty_strided",
      "aten.randint", sizes=_creation_size, expected=_creation_expected)  # fmt: skip
def _create(ctx: Context) -> Result:
    # Uniform along every axis: any position may go, none is tied yet.
    return LabelMap(ctx.shape, ctx.store.fresh(ctx.shape), weight=True)


@rule("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like", "aten.rand_like", "aten.randn_like",
      "aten.bernoulli")  # fmt: skip
def _create_like(ctx: Context) -> Result:
    # Its content is uniform and only its lengths follow the template: the same number goes from both.
    entries = []
    for entry in ctx.map("self").entries:
        if len(entry.axes) > 1:
            entries.append(entry)
            continue
        (new,) = ctx.store.fresh(ctx.shape, entry.axes)
        ctx.store.rectangular(np.stack([entry.labels, new.labels]))
        entries.append(new)
    return LabelMap(ctx.shape, tuple(entries), weight=True)


@rule("aten.fill", "aten.zero", "aten.normal_", "aten.uniform_", "aten.bernoulli_", "aten.exponential_",
      "aten.random_")  # fmt: skip
def _fill(ctx: Context) -> Result:
    return ctx.map("self")


@rule("aten.clone", "aten.detach", "aten.alias", "aten._to_copy", "aten.contiguous", "aten.lift_fresh",
      "aten.lift_fresh_copy", "aten.view_as_real_copy", "aten.positive", "aten.resolve_conj", "aten.resolve_neg",
      "aten.detach_", "aten.dropout", "aten.native_dropout", "aten.alpha_dropout", "aten.feature_dropout",
      "aten._conj", "aten.pin_memory")  # fmt: skip
def _copy(ctx: Context) -> Result:
    x = ctx.map("self" if "self" in ctx.call.arguments else "input")
    return x.with_shape(ctx.shape)


@rule("aten.copy", "aten.masked_fill", "aten.where", "aten.lerp", "aten.clamp", "aten.clamp_min", "aten.clamp_max",
      "aten.hardtanh", "aten.hardswish", "aten.hardsigmoid", "aten.silu", "aten.mish", "aten.gelu", "aten.elu",
      "aten.leaky_relu", "aten.softplus", "aten.threshold", "aten.log_sigmoid_forward", "aten.celu",
      "aten.rrelu_with_noise", "aten.relu6", "aten.selu", "aten.erf", "aten.floor_divide", "aten.remainder",
      "aten.fmod", "aten.complex", "aten.polar", "aten.nan_to_num", "aten.quantize_per_tensor")  # fmt: skip
def _pointwise(ctx: Context) -> Result:
    return op.pointwise(ctx.store, ctx.all_maps, ctx.shape)
