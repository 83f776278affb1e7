"""Matrix products, linear layers, einsum, attention, convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np

from openwork.graph import operators as op
from openwork.graph.labels import LabelMap
from openwork.graph.operators.pointwise import pin_axes
from openwork.torch.rules._registry import Context, Cost, Result, rule
from openwork.torch.watch import Call

Shape = tuple[int, ...]


def _product(ctx: Context, first: LabelMap, second: LabelMap) -> LabelMap:
    """Matmul with batch axes broadcast on the left."""
    a_rank, b_rank = len(first.shape), len(second.shape)
    batch = [f"b{i}" for i in range(max(a_rank, b_rank, 2) - 2)]
    a_index = batch[len(batch) - max(0, a_rank - 2) :] + (["m", "k"] if a_rank > 1 else ["k"])
    b_index = batch[len(batch) - max(0, b_rank - 2) :] + (["k", "n"] if b_rank > 1 else ["k"])
    out_index = batch + (["m"] if a_rank > 1 else []) + (["n"] if b_rank > 1 else [])
    out = op.contract(ctx.store, first, second, (a_index, b_index, out_index), ctx.shape)
    ctx.cost = Cost((*((out, axis) for axis in range(len(out.shape))), (first, a_rank - 1)))
    return out


@rule("torch.matmul")
def _matmul(ctx: Context) -> Result:
    return _product(ctx, ctx.map("input"), ctx.map("other"))


@rule("aten.mm", "aten.bmm")
def _mm(ctx: Context) -> Result:
    return _product(ctx, ctx.map("self"), ctx.map("mat2"))


def _by_expert(ctx: Context, a: LabelMap, b: LabelMap) -> LabelMap:
    """Rows [tokens, k] times the matrix of their expert [experts, k, n]."""
    b = pin_axes(ctx.store, b, [0], "which expert a row meets is picked by data")
    out = op.contract(ctx.store, a, b, (["t", "k"], ["e", "k", "n"], ["t", "n"]), ctx.shape)
    ctx.cost = Cost(((out, 0), (out, 1), (a, 1)))
    return out


@rule("transformers.grouped_mm_fallback")
def _grouped_mm_fallback(ctx: Context) -> Result:
    """What Hugging Face's transformers run where torch has no grouped product for the type."""
    return _by_expert(ctx, ctx.map("input"), ctx.map("weight"))


@rule("aten._grouped_mm")
def _grouped_mm(ctx: Context) -> Result:
    a, b = ctx.map("self"), ctx.map("mat2")
    if len(b.shape) != 3 or len(a.shape) != 2:
        return _product(ctx, a, b) if len(a.shape) == len(b.shape) == 3 else _not_understood(ctx, a, b)
    out = _by_expert(ctx, a, b)
    # Its kernels ask for rows of whole 16 bytes.
    first, second = ctx.get("self"), ctx.get("mat2")
    for tensor, labels in ((first, a), (second, b)):
        for axis in (len(labels.shape) - 2, len(labels.shape) - 1):
            entry = labels.entry(axis)
            if entry is not None and tensor.stride(axis) == 1:
                ctx.store.multiple(entry.labels, 16 // tensor.element_size())
    return out


def _not_understood(ctx: Context, *given: LabelMap) -> LabelMap:
    for labels in given:
        ctx.store.freeze_map(labels, "this use of the operator is not understood")
    return LabelMap(ctx.shape)


@rule("aten.mv")
def _mv(ctx: Context) -> Result:
    return _product(ctx, ctx.map("self"), ctx.map("vec"))


@rule("aten.dot", "aten.vdot")
def _dot(ctx: Context) -> Result:
    return op.contract(
        ctx.store,
        ctx.map("self"),
        ctx.map("tensor" if "tensor" in ctx.call.arguments else "other"),
        (["k"], ["k"], []),
        (),
    )


@rule("aten.addmm", "aten.addmm_")
def _addmm(ctx: Context) -> Result:
    out = _product(ctx, ctx.map("mat1"), ctx.map("mat2"))
    return op.pointwise(ctx.store, [out, ctx.map("self")], ctx.shape)


@rule("aten.baddbmm", "aten.baddbmm_")
def _baddbmm(ctx: Context) -> Result:
    out = _product(ctx, ctx.map("batch1"), ctx.map("batch2"))
    return op.pointwise(ctx.store, [out, ctx.map("self")], ctx.shape)


@rule("torch.linear", "aten.linear")
def _linear(ctx: Context) -> Result:
    x, weight, bias = ctx.map("input"), ctx.map("weight"), ctx.optional("bias")
    lead = [f"b{i}" for i in range(len(x.shape) - 1)]
    out_names = ["o"] if len(weight.shape) == 2 else []
    out = op.contract(ctx.store, x, weight, ([*lead, "k"], [*out_names, "k"], lead + out_names), ctx.shape)
    ctx.cost = Cost((*((out, axis) for axis in range(len(out.shape))), (x, len(x.shape) - 1)))
    if bias is not None:
        out = op.pointwise(ctx.store, [out, bias], ctx.shape)
    return out


@rule("torch.einsum")
def _einsum(ctx: Context) -> Result:
    first, second = ctx.map("first"), ctx.map("second")
    equation = ctx.get("equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    names = []
    for term, tensor in zip(terms, (first, second), strict=True):
        before, dots, after = term.partition("...")
        count = len(tensor.shape) - len(before) - len(after)
        ellipsis = [f"...{i}" for i in range(count - 1, -1, -1)] if dots else []
        names.append([*before, *ellipsis, *after])
    if arrow:
        before, dots, after = right.partition("...")
        widest = max((name for name in names), key=lambda n: sum(x.startswith("...") for x in n))
        ellipsis = [name for name in widest if name.startswith("...")] if dots else []
        out_names = [*before, *ellipsis, *after]
    else:
        every = names[0] + names[1]
        ellipsis = list(dict.fromkeys(name for name in every if name.startswith("...")))
        out_names = ellipsis + sorted(name for name in set(every) - set(ellipsis) if every.count(name) == 1)
    out = op.contract(ctx.store, first, second, (names[0], names[1], out_names), ctx.shape)
    summed = [i for i, name in enumerate(names[0]) if name not in out_names]
    ctx.cost = Cost((*((out, axis) for axis in range(len(out.shape))), *((first, axis) for axis in summed)))
    return out


@rule(
    "torch.scaled_dot_product_attention",
    "aten.scaled_dot_product_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_attention_math",
    "aten._scaled_dot_product_attention_math_for_mps",
    "aten._scaled_dot_product_fused_attention_overrideable",
)
def _attention(ctx: Context) -> Result:
    store = ctx.store
    query, key, value = ctx.map("query"), ctx.map("key"), ctx.map("value")
    rank = len(query.shape)
    if ctx.get("scale") is None:
        # The default scale is computed from the length of the last axis of the query: it must not change.
        why = "attention's default scale depends on this length"
        query, key = (pin_axes(store, tensor, [rank - 1], why) for tensor in (query, key))
    if rank > 3 and key.shape[-3] != query.shape[-3]:
        # Grouped queries: each key/value head serves several query heads.
        times = query.shape[-3] // key.shape[-3]
        key = op.repeat_interleave(store, key, rank - 3, times)
        value = op.repeat_interleave(store, value, rank - 3, times)
    batch = [f"b{i}" for i in range(rank - 2)]
    score_shape = (*query.shape[:-1], key.shape[-2])
    scores = op.contract(store, query, key, ([*batch, "q", "d"], [*batch, "k", "d"], [*batch, "q", "k"]), score_shape)
    mask = ctx.optional("attn_mask") or ctx.optional("attn_bias")
    if mask is not None:
        scores = op.pointwise(store, [scores, mask], score_shape)
    scores = op.mixed_along(store, scores, [rank - 1])
    out = op.contract(store, scores, value, ([*batch, "q", "k"], [*batch, "k", "v"], [*batch, "q", "v"]), ctx.shape)
    axes = tuple((scores, axis) for axis in range(rank))
    # Two products of the same size when query and value are equally wide.
    ctx.cost = Cost((*axes, (out, rank - 1)), 0.5)
    return out


def _convolution_groups(call: Call, shapes: list[Shape]) -> list[int]:
    return [int(call.get("groups", 1))]


def _expected_groups(record: Any, inputs: list[Shape], outputs: list[Shape], dead: np.ndarray) -> list[int]:
    groups = int(record.call_numbers.get("groups", 1))
    x, weight = record.inputs[0], record.inputs[1]
    channel = len(x.shape) - len(weight.shape) + 1
    depthwise = groups > 1 and groups == x.shape[channel]
    return [inputs[0][channel] if depthwise else groups]


@rule(
    "aten.convolution",
    "aten._convolution",
    "aten.mkldnn_convolution",
    "aten.convolution_overrideable",
    "aten.cudnn_convolution",
    sizes=_convolution_groups,
    expected=_expected_groups,
)
def _convolution(ctx: Context) -> Result:
    x, weight = ctx.map("input") if "input" in ctx.call.arguments else ctx.map("self"), ctx.map("weight")
    groups, transposed = int(ctx.get("groups", 1)), bool(ctx.get("transposed", False))
    bias = ctx.optional("bias")
    out = op.convolution(
        ctx.store,
        x,
        weight,
        bias,
        groups,
        transposed,
        ctx.shape,
        ctx.source.parameter_of(ctx.get("weight")),
    )
    taps = tuple((weight, axis) for axis in range(2, len(weight.shape)))
    channel = len(x.shape) - len(taps) - 1
    depthwise = groups > 1 and groups == x.shape[channel]
    if transposed:
        inner = () if depthwise and weight.shape[1] == 1 else ((out, channel),)
        ctx.cost = Cost(
            (*((x, axis) for axis in range(len(x.shape))), *(() if depthwise else inner), *taps),
            1.0 / weight.shape[1] if depthwise else float(groups),
        )
    else:
        inner = () if depthwise else ((x, channel),)
        ctx.cost = Cost(
            (*((out, axis) for axis in range(len(out.shape))), *inner, *taps), 1.0 if depthwise else float(groups)
        )
    return out
