"""Composite functions that are watched whole, and the reads of sizes that are noticed.

Each has a name of its own, ``torch.<function>``, and binds its arguments to fixed parameter names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

_MOST_NUMBERS = 4096

__all__ = ["COMPOSITES", "SIZE_READS", "VALUE_READS", "Composite"]


@dataclass(frozen=True, eq=False)
class Composite:
    """A composite function.

    Attributes:
        name: name in records and messages.
        bind: (args, kwargs) -> arguments by name, or None if this use is to be left to its parts.
        plain: a function that takes the bound arguments by name, where one is needed to call it again.
        shape: shape of the result from bound arguments; on meta tensors the function is then not run at all. None
            leaves the case, or the error, to the function itself.
        keeps_layout: the result lies in memory as the first argument does; else it is contiguous.
        fresh: its result shares no memory with its arguments.
        operator: the ATen overload that the bound arguments are of, if the call is to be seen as one.
    """

    name: str
    bind: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any] | None]
    plain: Callable[..., Any] | None = None
    shape: Callable[[dict[str, Any]], tuple[int, ...] | None] | None = None
    fresh: bool = False
    operator: Any = None
    keeps_layout: bool = False

    def call(self, arguments: dict[str, Any]) -> Any:
        """Run the function on bound arguments."""
        if self.plain is None:
            raise NotImplementedError(f"{self.name} cannot be called again")
        return self.plain(**arguments)


def _simple(
    name: str,
    pattern: Callable[..., Any],
    plain: Callable[..., Any] | None = None,
    shape: Callable[[dict[str, Any]], tuple[int, ...] | None] | None = None,
    fresh: bool = False,
    keeps_layout: bool = False,
) -> Composite:
    """Bind by the signature of `pattern`."""
    return Composite(name, _binder(pattern), plain, shape, fresh, keeps_layout=keeps_layout)


def _binder(pattern: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any] | None]:
    """What `inspect.Signature.bind` gives with defaults applied, for positional-or-keyword parameters, faster."""
    parameters = inspect.signature(pattern).parameters
    names = tuple(parameters)
    positional = sum(p.kind is not inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    needed = set(names) - set(defaults)

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        if len(args) > positional:
            return None
        given = dict(zip(names, args))
        for name, value in kwargs.items():
            if name in given or name not in parameters:
                return None
            given[name] = value
        if not needed <= given.keys():
            return None
        return {name: given[name] if name in given else defaults[name] for name in names}

    return bind


def _variadic(name: str, *lead: str, sizes: str) -> Composite:
    """``x.f(lead.., *sizes)`` where sizes may also be given as one list."""

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        values = dict(zip(("input", *lead), args, strict=False))
        rest = args[1 + len(lead) :]
        for key in ("shape", "size", "sizes"):
            if key in kwargs:
                rest = (kwargs[key],)
        for key in lead:
            if key in kwargs:
                values[key] = kwargs[key]
        if len(rest) == 1 and isinstance(rest[0], (list, tuple)):
            rest = tuple(rest[0])
        if not rest or not all(isinstance(size, int) for size in rest):
            return None
        return {**values, sizes: tuple(rest)}

    return Composite(name, bind)


def _matmul(name: str) -> Composite:
    return _simple(name, lambda input, other, *, out=None: None, torch.matmul, fresh=True)


def _reversed_matmul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    return {"input": args[1], "other": args[0]}


def _interleave(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    values = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
    if not isinstance(values.get("repeats"), int) or values.get("dim") is None:
        return None
    return {"input": values["input"], "repeats": values["repeats"], "dim": values["dim"]}


def _einsum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    if not args or not isinstance(args[0], str):
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if len(operands) != 2 or any(len(set(term)) != len(term) for term in _terms(args[0])):
        return None
    return {"equation": args[0], "first": operands[0], "second": operands[1]}


def _run_einsum(equation: str, first: Any, second: Any) -> Any:
    return torch.einsum(equation, first, second)


def _terms(equation: str) -> list[str]:
    return [part.replace("...", "") for part in equation.replace(" ", "").split("->")[0].split(",")]


def _constant(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Numbers that become a tensor: the model's code may have computed them from a length."""
    data = args[0] if args else kwargs.get("data")
    if isinstance(data, np.ndarray):
        data = data.ravel().tolist() if data.size <= _MOST_NUMBERS and data.dtype.kind in "fiu" else None
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        return {"data": data}
    if isinstance(data, (list, tuple)) and 0 < len(data) <= _MOST_NUMBERS:
        return {"data": tuple(data)} if all(isinstance(item, (int, float)) for item in data) else None
    return None


def _flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> None: ...
def _chunk(input: Any, chunks: int, dim: int = 0) -> None: ...
def _linear(input: Any, weight: Any, bias: Any = None) -> None: ...
def _layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> None: ...
def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> None: ...
def _group_norm(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> None: ...
def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None: ...


def _linear_shape(arguments: dict[str, Any]) -> tuple[int, ...]:
    x, weight = arguments["input"], arguments["weight"]
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(f"linear: input has {x.shape[-1]} features, weight is {list(weight.shape)}")
    return (*x.shape[:-1], weight.shape[0])


def _normalised_shape(arguments: dict[str, Any]) -> tuple[int, ...]:
    x, stated = arguments["input"], arguments["normalized_shape"]
    stated = (stated,) if isinstance(stated, int) else tuple(stated)
    for given in (tuple(x.shape[len(x.shape) - len(stated) :]), *(tuple(v.shape) for v in _vectors(arguments))):
        if given != stated:
            raise RuntimeError(f"norm: normalized_shape is {stated}, found {given}")
    return tuple(x.shape)


def _vectors(arguments: dict[str, Any]) -> list[Any]:
    found = (arguments.get(name) for name in ("weight", "bias", "running_mean", "running_var"))
    return [vector for vector in found if vector is not None]


def _group_shape(arguments: dict[str, Any]) -> tuple[int, ...]:
    x, groups = arguments["input"], arguments["num_groups"]
    if x.shape[1] % groups or any(vector.shape[0] != x.shape[1] for vector in _vectors(arguments)):
        raise RuntimeError(f"group_norm: {x.shape[1]} channels, {groups} groups")
    return tuple(x.shape)


def _batch_norm_shape(arguments: dict[str, Any]) -> tuple[int, ...]:
    x = arguments["input"]
    for vector in _vectors(arguments):
        if vector.shape[0] != x.shape[1]:
            raise RuntimeError(f"batch_norm: input has {x.shape[1]} channels, a parameter has {vector.shape[0]}")
    return tuple(x.shape)


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> None: ...


def _instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> None: ...


def _interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> None: ...


def _adaptive_pool(input: Any, output_size: Any) -> None: ...


def _conv(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> None: ...


def _convolution(spatial: int) -> Composite:
    """Seen as the operator that it calls."""
    bind_call = _binder(_conv)

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        given = bind_call(args, kwargs)
        if given is None or isinstance(given["padding"], str) or given["input"].dim() != spatial + 2:
            return None
        stride, padding, dilation = (_per_axis(given[name], spatial) for name in ("stride", "padding", "dilation"))
        return {
            "input": given["input"],
            "weight": given["weight"],
            "bias": given["bias"],
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "transposed": False,
            "output_padding": [0] * spatial,
            "groups": given["groups"],
        }

    operator = torch.ops.aten.convolution.default
    return Composite(str(operator), bind, None, _convolution_shape, operator=operator)


def _per_axis(value: Any, count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _convolution_shape(arguments: dict[str, Any]) -> tuple[int, ...] | None:
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    groups, out = arguments["groups"], weight.shape[0]
    if weight.dim() != x.dim() or x.shape[1] != weight.shape[1] * groups or out % groups:
        return None
    if bias is not None and tuple(bias.shape) != (out,):
        return None
    if not (x.is_contiguous() and weight.is_contiguous()) or x.dtype != weight.dtype:
        return None
    sizes = []
    for axis, (stride, padding, dilation) in enumerate(
        zip(arguments["stride"], arguments["padding"], arguments["dilation"])
    ):
        reach = dilation * (weight.shape[axis + 2] - 1) + 1
        free = x.shape[axis + 2] + 2 * padding - reach
        if free < 0 or stride < 1:
            return None
        sizes.append(free // stride + 1)
    return (x.shape[0], out, *sizes)


_RESHAPE = _variadic("torch.reshape", sizes="shape")
_UNFLATTEN = _variadic("torch.unflatten", "dim", sizes="sizes")
_FLATTEN = _simple("torch.flatten", _flatten)
_CHUNK = _simple("torch.chunk", _chunk)
_EINSUM = Composite("torch.einsum", _einsum, _run_einsum, fresh=True)
_REPEAT_INTERLEAVE = Composite("torch.repeat_interleave", _interleave)

COMPOSITES: dict[Any, Composite] = {
    torch.reshape: _RESHAPE,
    torch.Tensor.reshape: _RESHAPE,
    torch.unflatten: _UNFLATTEN,
    torch.Tensor.unflatten: _UNFLATTEN,
    torch.flatten: _FLATTEN,
    torch.Tensor.flatten: _FLATTEN,
    **{make: Composite("torch.tensor", _constant) for make in (torch.tensor, torch.as_tensor, torch.from_numpy)},
    torch.chunk: _CHUNK,
    torch.Tensor.chunk: _CHUNK,
    torch.repeat_interleave: _REPEAT_INTERLEAVE,
    torch.Tensor.repeat_interleave: _REPEAT_INTERLEAVE,
    torch.matmul: _matmul("torch.matmul"),
    torch.Tensor.matmul: _matmul("torch.matmul"),
    torch.Tensor.__matmul__: _matmul("torch.matmul"),
    torch.Tensor.__rmatmul__: Composite("torch.matmul", _reversed_matmul, torch.matmul, fresh=True),
    torch.einsum: _EINSUM,
    torch.functional.einsum: _EINSUM,
    F.linear: _simple("torch.linear", _linear, F.linear, _linear_shape),
    F.batch_norm: _simple("torch.batch_norm", _batch_norm, F.batch_norm, _batch_norm_shape, keeps_layout=True),
    F.layer_norm: _simple("torch.layer_norm", _layer_norm, F.layer_norm, _normalised_shape),
    F.group_norm: _simple("torch.group_norm", _group_norm, F.group_norm, _group_shape, keeps_layout=True),
    F.instance_norm: _simple("torch.instance_norm", _instance_norm, F.instance_norm, fresh=True),
    F.scaled_dot_product_attention: _simple(
        "torch.scaled_dot_product_attention", _attention, F.scaled_dot_product_attention, fresh=True
    ),
    # Its own parts restate sizes where channels lie last in memory.
    **{
        pool: _simple(f"torch.{pool.__name__}", _adaptive_pool, pool, fresh=True)
        for pool in (F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
    },
    F.interpolate: _simple("torch.interpolate", _interpolate, F.interpolate, fresh=True),
    torch.conv1d: _convolution(1),
    torch.conv2d: _convolution(2),
    torch.conv3d: _convolution(3),
}
if hasattr(F, "rms_norm"):
    COMPOSITES[F.rms_norm] = _simple("torch.rms_norm", _rms_norm, F.rms_norm, _normalised_shape, keeps_layout=True)


def _axis_of_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    return axis if isinstance(axis, int) else None


def _all_axes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    return None


# Function -> which axis is read (None: all).
SIZE_READS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], int | None]] = {
    torch.Tensor.shape.__get__: _all_axes,  # type: ignore[attr-defined]
    torch.Tensor.size: _axis_of_size,
    torch.Tensor.numel: _all_axes,
    torch.numel: _all_axes,
    torch.Tensor.nelement: _all_axes,
    torch.Tensor.__len__: lambda args, kwargs: 0,
}

# Functions through which values leave for Python without an operator being called.
VALUE_READS: set[Any] = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}
