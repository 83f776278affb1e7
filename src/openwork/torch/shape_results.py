"""Results of operators on meta tensors without torch's own shape functions, most of which are slow Python.

Common elementwise operators are answered directly. Of all others that make fresh tensors, the first answer to the
same question (operator, shapes, strides, types, other arguments) is kept: a network asks the same again in each of
its layers, and again whenever it is run on shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from openwork.torch.composites import Composite

__all__ = ["ShapeResults", "empty_strided", "like", "refused"]

_ELEMENTWISE = {
    "relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "silu", "gelu", "hardswish", "hardsigmoid",
    "sigmoid", "tanh", "leaky_relu", "elu", "mish", "softplus", "add", "sub", "rsub", "mul", "div", "neg", "exp",
    "log", "sqrt", "rsqrt", "abs", "sin", "cos", "erf", "square", "reciprocal",
}  # fmt: skip

# Creating tensors from inside a composite function would go through the watcher once more.
_unwatched: Callable[[], Any] | None = getattr(torch._C, "_DisableTorchDispatch", None)


def empty_strided(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the meta device, past any dispatch mode that is active."""
    if _unwatched is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    with _unwatched():
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def refused(call: Any) -> torch.Tensor | None:
    """The result, on shapes, of an operator that runs on values but whose shape function asks for another type.

    None for all others.
    """
    if call.name != "aten._grouped_mm.default":
        return None
    first, second = call.get("self"), call.get("mat2")
    symbolic = first.is_meta or type(first).__name__ == "FakeTensor"
    if not symbolic or (first.dim(), second.dim()) != (2, 3):
        return None
    result: torch.Tensor = first.new_empty((first.shape[0], second.shape[2]), dtype=call.get("out_dtype"))
    return result


class _Made:
    """Shape, strides and type of one result."""

    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.dtype = tensor.dtype


class ShapeResults:
    """Answers to calls on meta tensors; one for a model and all that is run of it."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._plans: dict[str, int] = {}

    def of(self, call: Any, run: Callable[[], Any]) -> Any:
        """The result of a call: from memory, by rule, or by running it."""
        plan = self._plans.get(call.name)
        if plan is None:
            plan = self._plans[call.name] = _plan(call.name, call.function)
        if plan == _RUN:
            return run()
        if plan != _KEEP:
            result = _elementwise(call, plan == _IN_PLACE)
            if result is not None or plan == _IN_PLACE:
                return run() if result is None else result
        key = _key(call)
        if key is None:
            return run()
        known = self._known.get(key)
        if known is None:
            result = run()
            noted = _note(result)
            if noted is not None:
                self._known[key] = noted
            return result
        return _make(known)


_RUN, _KEEP, _FRESH, _IN_PLACE = range(4)


def _plan(name: str, function: Any) -> int:
    if isinstance(function, Composite):
        return _KEEP if function.fresh else _RUN
    schema = function._schema
    fresh = not any(item.alias_info is not None for item in (*schema.arguments, *schema.returns))
    plain = name.split(".")[1]
    if plain.rstrip("_") in _ELEMENTWISE:
        return _IN_PLACE if plain.endswith("_") else _FRESH if fresh else _RUN
    return _KEEP if fresh else _RUN


def _elementwise(call: Any, in_place: bool) -> torch.Tensor | None:
    given = call.tensors
    if not given:
        return None
    first = given[0]
    dtype = first.dtype
    if not dtype.is_floating_point:
        return None
    shape = first.shape
    for tensor in given:
        if tensor.device.type != "meta" or tensor.dtype != dtype:
            return None
        if tensor.shape != shape:
            return None if in_place else _broadcast(given)
    if any(isinstance(value, complex) for value in call.arguments.values()):
        return None
    return first if in_place else like(first)


def like(tensor: torch.Tensor) -> torch.Tensor | None:
    """What torch.empty_like gives for a meta tensor without gaps or overlaps; None for others."""
    shape, stride = tensor.shape, tensor.stride()
    if not tensor.is_contiguous():
        step = 1
        for each, size in sorted(zip(stride, shape)):
            if size != 1:
                if each != step:
                    return None
                step *= size
    return empty_strided(shape, stride, tensor.dtype)


def _broadcast(given: list[torch.Tensor]) -> torch.Tensor | None:
    """Of two operands where one is as large as the result."""
    if len(given) != 2 or given[0].dtype != given[1].dtype or given[1].device.type != "meta":
        return None
    large, small = given if given[0].numel() >= given[1].numel() else given[::-1]
    rank = small.dim()
    if rank > large.dim():
        return None
    for wide, narrow in zip(large.shape[large.dim() - rank :], small.shape):
        if narrow != wide and narrow != 1:
            return None
    return like(large)


def _key(call: Any) -> Any:
    """What the shape of a result depends on; None if it cannot be told."""
    parts: list[Any] = [call.name]
    for name, value in call.arguments.items():
        known = _fact(value)
        if known is None:
            return None
        parts.append((name, known))
    return tuple(parts)


def _fact(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta" or value.layout != torch.strided:
            return None
        return value.shape, value.stride(), value.dtype
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, torch.memory_format,
                                           torch.layout)):  # fmt: skip
        return type(value).__name__, value
    if isinstance(value, (list, tuple)):
        facts = tuple(_fact(item) for item in value)
        return None if any(fact is None for fact in facts) else facts
    return None


def _note(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return _Made(result) if result.device.type == "meta" and result.layout == torch.strided else None
    if type(result) in (list, tuple) and result:
        noted = [_note(item) for item in result]
        return None if any(item is None for item in noted) else type(result)(noted)
    return None


def _make(noted: Any) -> Any:
    if isinstance(noted, _Made):
        return empty_strided(noted.shape, noted.stride, noted.dtype)
    return type(noted)(_make(item) for item in noted)
