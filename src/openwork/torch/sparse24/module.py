"""Masked layers: a layer's class is exchanged for a subclass of it, of the same name, and back.

The subclass changes nothing but the forward. Parameters, state_dict keys, hooks, isinstance, padding modes,
dtype and device stay what they were. Deep copies and pickles carry the mask along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from openwork.config import NofMSetting
from openwork.torch.sparse24.functions import (
    MaskedConvolution,
    MaskedLinear,
    MaskWeight,
    convolves_few,
    mask_gradient,
    multiplies_few,
)
from openwork.torch.sparse24.layers import kind_of
from openwork.torch.sparse24.products import Rule
from openwork.torch.sparse24.state import MaskState, refresh, refresh_mask

__all__ = [
    "MaskedLayer",
    "effective_weight",
    "has_own_forward",
    "is_masked",
    "mask_layer",
    "masked_class",
    "state_of",
    "unmask_layer",
    "with_weight",
]

_STATE = "_openwork_mask"


class MaskedLayer:
    """Mixed into the class of a layer, in front of it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self
        state: MaskState = layer.__dict__[_STATE]
        weight = layer._parameters["weight"]
        if type(layer)._openwork_own_forward or len(args) + len(kwargs) != 1:
            return with_weight(layer, effective_weight(layer), *args, **kwargs)
        mask, rule = _refresh(state, weight, layer.training, postpone=not state.in_place)
        x = args[0] if args else next(iter(kwargs.values()))
        forward = (
            _linear if isinstance(layer, nn.Linear) else _convolution if isinstance(layer, nn.Conv2d) else _transposed
        )
        result = forward(layer, x, weight, state, mask, rule)
        if rule is not None:
            state.take(mask)
        return result

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        layer: Any = super()._apply(fn, recurse)  # type: ignore[misc]
        state: MaskState = layer.__dict__[_STATE]
        device = layer._parameters["weight"].device
        if state.mask.device != device:
            state.mask = torch.ones_like(state.mask, device=device) if state.mask.is_meta else state.mask.to(device)
        return layer

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]
        if f"{prefix}weight" in state_dict:
            layer: Any = self
            state_of(layer).forget(layer._parameters["weight"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The subclass has no name of its own by which pickle could find it.
        return _rebuild, (type(self)._openwork_plain,), self.__dict__  # type: ignore[attr-defined]


def effective_weight(layer: Any) -> Tensor:
    """The masked weight of a masked layer, for one forward; its gradient reaches the parameter."""
    state: MaskState = layer.__dict__[_STATE]
    weight = layer._parameters["weight"]
    mask, _ = _refresh(state, weight, layer.training)
    effective: Tensor = mask_gradient(weight, mask) if state.in_place else MaskWeight.apply(weight, mask, state.decay)
    return effective


def with_weight(layer: Any, effective: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The plain forward of a layer, which reads self.weight, with another weight."""
    weight = layer._parameters["weight"]
    layer._parameters["weight"] = effective
    try:
        return type(layer)._openwork_plain.forward(layer, *args, **kwargs)
    finally:
        layer._parameters["weight"] = weight


def _refresh(state: MaskState, weight: Tensor, training: bool, postpone: bool = False) -> tuple[Tensor, Rule | None]:
    if not torch.compiler.is_compiling():
        return refresh(state, weight, training, postpone)
    with torch.no_grad():
        detached = weight.detach()
        n, m, axis, blocks, update_freq = state.settings_for_compiled()
        state.mask = refresh_mask(detached, state.mask, state.counters, n, m, axis, blocks, update_freq, training)
    return state.mask, None


def _autocast(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Cast as autocast would: the functions of masked layers are unknown to it."""
    kind = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        return x.to(dtype), bias if bias is None else bias.to(dtype)
    return x, bias


def _linear(layer: Any, x: Tensor, weight: Tensor, state: MaskState, mask: Tensor, rule: Rule | None) -> Tensor:
    in_place = state.in_place
    if in_place and not multiplies_few(x, weight, mask):
        return functional.linear(x, mask_gradient(weight, mask), layer.bias)
    x, bias = _autocast(x, layer.bias)
    result: Tensor = MaskedLinear.apply(x, weight, mask, bias, state.decay, in_place, rule)
    return result


def _convolution(layer: Any, x: Tensor, weight: Tensor, state: MaskState, mask: Tensor, rule: Rule | None) -> Tensor:
    if not state.in_place:
        return _run(layer, *_padded(layer, x), weight, state, mask, rule)
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        x, settings = _padded(layer, x)
        if convolves_few(x, weight, mask, settings):
            return _run(layer, x, settings, weight, state, mask, rule)
    result: Tensor = layer._conv_forward(x, mask_gradient(weight, mask), layer.bias)
    return result


def _padded(layer: Any, x: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """The input, padded where the layer pads in a way that the operator does not know, and the operator's settings."""
    padding = layer.padding
    if layer.padding_mode != "zeros":
        x = functional.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = (0, 0)
    elif padding == "valid":
        padding = (0, 0)
    elif padding == "same":
        total = [step * (size - 1) for step, size in zip(layer.dilation, layer.kernel_size)]
        if any(size % 2 for size in total):
            left = [size // 2 for size in total]
            x = functional.pad(x, (left[1], total[1] - left[1], left[0], total[0] - left[0]))
            padding = (0, 0)
        else:
            padding = tuple(size // 2 for size in total)
    return x, (list(layer.stride), list(padding), list(layer.dilation), False, [0, 0], layer.groups)


def _transposed(layer: Any, x: Tensor, weight: Tensor, state: MaskState, mask: Tensor, rule: Rule | None) -> Tensor:
    if state.in_place:
        return functional.conv_transpose2d(
            x,
            mask_gradient(weight, mask),
            layer.bias,
            layer.stride,
            layer.padding,
            layer.output_padding,
            layer.groups,
            layer.dilation,
        )
    settings = (
        list(layer.stride),
        list(layer.padding),
        list(layer.dilation),
        True,
        list(layer.output_padding),
        layer.groups,
    )
    return _run(layer, x, settings, weight, state, mask, rule)


def _run(
    layer: Any,
    x: Tensor,
    settings: tuple[Any, ...],
    weight: Tensor,
    state: MaskState,
    mask: Tensor,
    rule: Rule | None,
) -> Tensor:
    x, bias = _autocast(x, layer.bias)
    batched = x.dim() == 4
    result: Tensor = MaskedConvolution.apply(
        x if batched else x.unsqueeze(0), weight, mask, bias, settings, state.decay, state.in_place, rule
    )
    return result if batched else result.squeeze(0)


def has_own_forward(plain: Any) -> bool:
    """Whether a layer class computes something else than torch's layer that it extends."""
    return (
        not any(plain.forward is base.forward for base in (nn.Linear, nn.Conv2d, nn.ConvTranspose2d))
        or getattr(plain, "_conv_forward", nn.Conv2d._conv_forward) is not nn.Conv2d._conv_forward
    )


@functools.cache
def masked_class(plain: Any) -> Any:
    """The masked subclass of a layer class."""
    # The names are the layer's own: config files, printed models and AMCT's tools tell layers by them.
    names = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "_openwork_own_forward": has_own_forward(plain),
        "_openwork_plain": plain,
    }
    return type(plain.__name__, (MaskedLayer, plain), names)


def _rebuild(plain: Any) -> nn.Module:
    masked = masked_class(plain)
    layer: nn.Module = masked.__new__(masked)
    return layer


def is_masked(layer: nn.Module) -> bool:
    """Whether `layer` carries a mask."""
    return isinstance(layer, MaskedLayer)


def state_of(layer: nn.Module) -> MaskState:
    """The mask of a masked layer."""
    state: MaskState = layer.__dict__[_STATE]
    return state


def mask_layer(layer: nn.Module, setting: NofMSetting) -> None:
    """Turn a plain layer, in place, into a masked one; nothing is masked before its first forward."""
    kind = kind_of(layer)
    assert kind is not None
    layer.__dict__[_STATE] = MaskState.of(
        layer._parameters["weight"],  # type: ignore[arg-type]
        setting,
        kind.axis,
        kind.blocks(layer),
    )
    plain: Any = type(layer)
    layer.__class__ = masked_class(plain)


def unmask_layer(layer: nn.Module) -> None:
    """Turn a masked layer back into the plain one that it was; its weight keeps the values it has."""
    plain: Any = type(layer)
    layer.__class__ = plain._openwork_plain
    del layer.__dict__[_STATE]
