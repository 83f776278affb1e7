"""Elementwise operators, copies, control flow of conditionals, and operators that make a tensor."""

from __future__ import annotations

import numpy as np

from openwork.graph import operators as op
from openwork.graph.labels import LabelMap
from openwork.tensorflow.rules._registry import Context, Record, Result, rule

_UNARY = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cast", "Ceil", "Cos", "Cosh", "Digamma", "Elu", "Erf",
    "Erfc", "Exp", "Expm1", "Floor", "Inv", "IsFinite", "IsInf", "IsNan", "LeakyRelu", "Lgamma", "Log", "Log1p",
    "LogicalNot", "Neg", "Reciprocal", "Relu", "Relu6", "Rint", "Round", "Rsqrt", "Selu", "Sigmoid", "Sign", "Sin",
    "Sinh", "Softplus", "Softsign", "Sqrt", "Square", "Tan", "Tanh", "Erfinv", "Ndtri", "Invert", "Bitcast",
)  # fmt: skip
_NARY = (
    "Add", "AddV2", "AddN", "Sub", "Mul", "MulNoNan", "Div", "DivNoNan", "RealDiv", "FloorDiv", "TruncateDiv", "Mod",
    "FloorMod", "TruncateMod", "Maximum", "Minimum", "Pow", "SquaredDifference", "Atan2", "Equal", "NotEqual", "Less",
    "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr", "ApproximateEqual", "Xdivy", "Xlogy",
    "Xlog1py", "SelectV2", "ClipByValue", "AccumulateNV2", "ReluGrad", "Relu6Grad", "SigmoidGrad", "TanhGrad",
    "FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars", "QuantizeAndDequantizeV2", "QuantizeAndDequantizeV3",
    "QuantizeAndDequantizeV4",
)  # fmt: skip


@rule(*_UNARY, *_NARY)
def _pointwise(ctx: Context) -> Result:
    return op.pointwise(ctx.store, ctx.inputs, ctx.shape)


@rule("Select")
def _select(ctx: Context) -> Result:
    condition, first, second = ctx.inputs
    if len(condition.shape) == 1 and len(first.shape) > 1:
        # A vector chooses whole rows.
        condition = LabelMap((condition.shape[0], *(1,) * (len(first.shape) - 1)), condition.entries, condition.weight)
    return op.pointwise(ctx.store, [condition, first, second], ctx.shape)


@rule("FakeQuantWithMinMaxVarsPerChannel")
def _fake_quant(ctx: Context) -> Result:
    x = ctx.inputs[0]
    for vector in ctx.inputs[1:3]:
        x = op.tie_vector(ctx.store, x, len(x.shape) - 1, vector)
    return x


@rule("Identity", "StopGradient", "PreventGradient", "Snapshot", "CheckNumerics", "CheckNumericsV2", "Print",
      "PrintV2", "RefIdentity", "EnsureShape", "DeepCopy", "ReadVariableOp")  # fmt: skip
def _copy(ctx: Context) -> Result:
    return ctx.inputs[0].with_shape(ctx.shape)


@rule("PlaceholderWithDefault")
def _default(ctx: Context) -> Result:
    ctx.store.freeze_map(ctx.inputs[0], "the caller may feed it")
    return LabelMap(ctx.shape)


@rule("IdentityN")
def _copies(ctx: Context) -> Result:
    return [tensor.with_shape(shape) for tensor, shape in zip(ctx.inputs, ctx.shapes, strict=True)]


@rule("Switch", "RefSwitch")
def _switch(ctx: Context) -> Result:
    """Both branches get the tensor."""
    return [ctx.inputs[0], ctx.inputs[0]]


@rule("Merge", "RefMerge")
def _merge(ctx: Context) -> Result:
    """Either branch may come: what goes from one goes from all."""
    return [op.pointwise(ctx.store, ctx.inputs, ctx.shape), LabelMap(())]


@rule("Enter", "RefEnter")
def _enter(ctx: Context) -> Result:
    ctx.store.freeze_map(ctx.inputs[0], "used inside a loop")
    return LabelMap(ctx.shape)


@rule("NextIteration", "Exit", "RefNextIteration", "RefExit")
def _leave(ctx: Context) -> Result:
    ctx.store.freeze_map(ctx.inputs[0], "carried by a loop")
    return LabelMap(ctx.shape)


@rule("ZerosLike", "OnesLike")
def _like(ctx: Context) -> Result:
    return ctx.inputs[0]


def _expected_shape(record: Record, dead: np.ndarray) -> dict[int, np.ndarray]:
    given = record.values.get(0)
    return {} if given is None else {0: np.asarray(record.new_shape(0, dead), dtype=given.dtype).reshape(given.shape)}


@rule("Fill", "RandomUniform", "RandomStandardNormal", "TruncatedNormal", "StatelessRandomUniform",
      "StatelessRandomUniformV2", "StatelessRandomNormal", "StatelessRandomNormalV2", "RandomUniformInt",
      values=(0,), expected=_expected_shape, makes=True)  # fmt: skip
def _made(ctx: Context) -> Result:
    """Uniform along every axis: any position may go, none is tied yet."""
    return LabelMap(ctx.shape, ctx.store.fresh(ctx.shape), weight=True)


@rule("Shape", "ShapeN", "Size", "Rank", "NoOp", "Assert", "VarIsInitializedOp", "IsVariableInitialized")
def _about(ctx: Context) -> Result:
    """What is said of a tensor, not what is in it."""
    return [LabelMap(shape) for shape in ctx.shapes]
