"""Put quantisation-aware training on a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from openwork.config import QuantSetting
from openwork.errors import ConfigError, ModelError, UnsupportedModelError, nearest, wrong_model
from openwork.torch.quant.module import is_quantized, quantize_layer
from openwork.torch.sparse24.apply import check_finite, check_kinds, copy_model, keep_forwards
from openwork.torch.sparse24.layers import kind_of

__all__ = ["apply_quant", "quantizable_layers", "quantize_layers", "quantized_layers"]


def quantizable_layers(model: nn.Module) -> dict[str, str]:
    """Every Linear, Conv2d and ConvTranspose2d of `model` by name, with why it cannot be quantised.

    The reason is an empty string for layers that can.
    """
    holders: dict[int, int] = {}
    for layer in model.modules():
        for parameter in layer._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    result = {}
    for name, layer in model.named_modules():
        if kind_of(layer) is not None:
            result[name] = _why_not(layer, holders)
    return result


def _why_not(layer: nn.Module, holders: Mapping[int, int]) -> str:
    weight = layer._parameters.get("weight")
    if is_quantized(layer):
        return "it is quantised already"
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "its weight is read by the attention module around it, not by its own forward"
    if parametrize.is_parametrized(layer, "weight") or weight is None:
        return "its weight is made by another wrapper"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight has no shape yet (a lazy module); run the model once first"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}, not a float"
    if holders.get(id(weight), 1) > 1:
        return f"its weight is shared by {holders[id(weight)]} modules"
    return ""


def apply_quant(model: nn.Module, settings: Mapping[str, QuantSetting], batches: int = 1) -> nn.Module:
    """Copy a model and let layers of the copy simulate quantisation, in training and evaluation.

    Args:
        model: a plain model, or one with N:M masks; it is not changed.
        settings: layer name -> how to quantise its input and weight.
        batches: training forwards that the first clip ranges are taken from.

    Returns:
        The copy, with the keys ``<layer>.input_quant.*`` and ``<layer>.weight_quant.*`` added.

    Raises:
        UnsupportedModelError: `model` is no module, or a layer is quantised already.
        ConfigError: a name is no layer, or the layer cannot be quantised (the reason is in the message).
        ModelError: a weight has NaN or infinity, or is not float32.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise wrong_model("model", model, "a Python torch.nn.Module")
    check_kinds(settings, QuantSetting)
    reasons = quantizable_layers(model)
    for name, layer in model.named_modules():
        if is_quantized(layer):
            raise UnsupportedModelError(f"layer {name!r} is quantised already")
    for name in settings:
        if name not in reasons:
            raise ConfigError(f"the model has no layer {name!r} to quantise; {nearest(name, reasons)}")
        if reasons[name]:
            raise ConfigError(f"layer {name!r} cannot be quantised: {reasons[name]}")
    result = copy_model(model)
    quantize_layers(result, settings, batches)
    return result


def quantize_layers(model: nn.Module, settings: Mapping[str, QuantSetting], batches: int) -> None:
    """Quantise layers of a model itself.

    Raises:
        ModelError: a weight has NaN or infinity, or is not float32.
    """
    layers = dict(model.named_modules())
    for name in settings:
        weight: Tensor = layers[name]._parameters["weight"]  # type: ignore[assignment]
        if weight.dtype is not torch.float32:
            raise ModelError(
                f"layer {name!r}: its weight is {weight.dtype}; quantisation-aware training needs torch.float32 "
                "(autocast may still compute in half precision)"
            )
    check_finite({name: layers[name] for name in settings})
    for name, setting in settings.items():
        quantize_layer(layers[name], setting, batches, name)
    keep_forwards(model, is_quantized)


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of `model` that simulate quantisation, by name."""
    return {name: layer for name, layer in model.named_modules() if is_quantized(layer)}
