"""Quantised layers in training: a layer's class is exchanged for a subclass of it, of the same name.

A masked layer may be quantised as well: mask first, then quantisation. The parameters of quantisation are two
submodules of the layer, ``input_quant`` and ``weight_quant``; all other keys of the state_dict stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from openwork.config import QuantSetting
from openwork.torch.quant.fake import InputQuant, WeightQuant
from openwork.torch.sparse24.module import MaskedLayer, effective_weight, is_masked, masked_class, state_of, with_weight

__all__ = [
    "QuantLayer",
    "current_weight",
    "is_quantized",
    "output_axis",
    "quantize_layer",
    "unquantize_layer",
    "with_input",
]


class QuantLayer:
    """Mixed into the class of a layer, in front of it and of its mask."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self
        weight = effective_weight(layer) if is_masked(layer) else layer._parameters["weight"]
        args, kwargs = with_input(layer.input_quant, args, kwargs)
        return with_weight(layer, layer.weight_quant(weight), *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The subclass has no name of its own by which pickle could find it.
        kind: Any = type(self)
        return _rebuild, (kind._openwork_plain, issubclass(kind, MaskedLayer)), self.__dict__


def with_input(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer's forward with another input: the first argument, or the one named ``input``."""
    if args or not kwargs:
        return (*(change(value) for value in args[:1]), *args[1:]), kwargs
    name = "input" if "input" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


@functools.cache
def _quantized_class(inner: Any) -> Any:
    """The quantised subclass of a plain or masked layer class."""
    names = {
        "__module__": inner.__module__,
        "__qualname__": inner.__qualname__,
        "__doc__": inner.__doc__,
        "_openwork_plain": getattr(inner, "_openwork_plain", inner),
        "_openwork_inner": inner,
    }
    return type(inner.__name__, (QuantLayer, inner), names)


def _rebuild(plain: Any, masked: bool) -> nn.Module:
    kind = _quantized_class(masked_class(plain) if masked else plain)
    layer: nn.Module = kind.__new__(kind)
    return layer


def is_quantized(layer: nn.Module) -> bool:
    """Whether `layer` simulates quantisation."""
    return isinstance(layer, QuantLayer)


def output_axis(layer: nn.Module) -> int:
    """The axis of output channels of a layer's weight."""
    return 1 if isinstance(layer, nn.ConvTranspose2d) else 0


def quantize_layer(layer: Any, setting: QuantSetting, batches: int, name: str = "") -> None:
    """Turn a plain or masked layer, in place, into one that simulates quantisation."""
    weight: Tensor = layer._parameters["weight"]
    layer.input_quant = InputQuant(setting.data, batches, weight.device, name).train(layer.training)
    layer.weight_quant = WeightQuant(setting.weight, weight, output_axis(layer)).train(layer.training)
    kind: Any = type(layer)
    layer.__class__ = _quantized_class(kind)


def unquantize_layer(layer: Any) -> None:
    """Turn a quantised layer back into what it was; its weight keeps its values."""
    layer.__class__ = type(layer)._openwork_inner
    del layer.input_quant, layer.weight_quant


@torch.no_grad()
def current_weight(layer: Any) -> Tensor:
    """The weight of a layer under its mask, if it has one, before quantisation."""
    weight: Tensor = layer._parameters["weight"].detach()
    if not is_masked(layer):
        return weight
    return weight.masked_fill(~state_of(layer).current(weight), 0.0)
