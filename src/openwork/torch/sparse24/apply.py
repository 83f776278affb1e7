"""Put N:M masks on a model, read and write them, and take them off again leaving exact zeros."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from openwork.config import NofMSetting
from openwork.errors import ConfigError, ModelError, RecordError, UnsupportedModelError, nearest, wrong_model
from openwork.errors import kind_of as kind_of_value
from openwork.sparsity.masks import BoolArray, apply_mask_, check
from openwork.torch.sparse24.layers import kind_of, why_not_maskable
from openwork.torch.sparse24.module import is_masked, mask_layer, state_of, unmask_layer
from openwork.torch.structure import copy_structure, one_line

__all__ = [
    "apply_24",
    "check_kinds",
    "check_settings",
    "copy_model",
    "finalize",
    "free_forwards",
    "keep_forwards",
    "load_masks",
    "mask_layers",
    "maskable_layers",
    "masked_layers",
    "masks_of",
    "through_forward",
]

_log = logging.getLogger("openwork")


def maskable_layers(model: nn.Module, n: int = 2, m: int = 4) -> dict[str, str]:
    """Every Linear, Conv2d and ConvTranspose2d of `model` by name, with why it cannot hold an N:M mask.

    The reason is an empty string for layers that can.
    """
    holders: dict[int, int] = {}
    for layer in model.modules():
        for parameter in layer._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    result = {}
    for name, layer in model.named_modules():
        if kind_of(layer) is None:
            continue
        uses = holders.get(id(layer._parameters.get("weight")), 1)
        result[name] = "it carries a mask already" if is_masked(layer) else why_not_maskable(layer, uses, n, m)
    return result


def apply_24(model: nn.Module, settings: Mapping[str, NofMSetting]) -> nn.Module:
    """Copy a model and mask layers of the copy.

    The copy's class, parameters and state_dict keys are those of `model`. A mask is chosen at a layer's first
    forward, and again as its `NofMSetting` says; nothing is masked before.

    Args:
        model: any module; it is not changed.
        settings: layer name -> what to do with it.

    Returns:
        The masked copy.

    Raises:
        UnsupportedModelError: `model` is no module, is a ScriptModule, is quantised, or has masks already.
        ConfigError: a name is no layer, or the layer cannot hold the mask (the reason is in the message).
        ModelError: a weight has NaN or infinity.
    """
    check_settings(model, settings)
    result = copy_model(model)
    mask_layers(result, settings)
    return result


def check_kinds(settings: Any, kind: type) -> None:
    """Raise unless `settings` maps names of layers to objects of a class.

    Raises:
        ConfigError: no mapping, a name that is no text, or a value of another class.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings is {kind_of_value(settings)}; a dict of layer names to {kind.__name__} is needed")
    for name, setting in settings.items():
        if not isinstance(name, str):
            raise ConfigError(f"settings: {name!r} is {kind_of_value(name)}; the name of a layer, as str, is needed")
        if not isinstance(setting, kind):
            raise ConfigError(f"settings[{name!r}] is {kind_of_value(setting)}; a {kind.__name__} is needed")


def check_settings(model: nn.Module, settings: Mapping[str, NofMSetting]) -> None:
    """Raise what `apply_24` raises for this model and settings."""
    _check_model(model)
    check_kinds(settings, NofMSetting)
    reasons: dict[tuple[int, int], dict[str, str]] = {}
    for name, setting in settings.items():
        pattern = setting.n, setting.m
        if pattern not in reasons:
            reasons[pattern] = maskable_layers(model, *pattern)
        known = reasons[pattern]
        if name not in known:
            modules = dict(model.named_modules())
            if name in modules:
                raise ConfigError(f"layer {name!r} cannot be masked: {why_not_maskable(modules[name])}")
            raise ConfigError(f"the model has no layer {name!r} to mask; {nearest(name, known)}")
        if known[name]:
            raise ConfigError(f"layer {name!r} cannot be masked: {known[name]}")
    layers = dict(model.named_modules())
    check_finite({name: layers[name] for name in settings})


def check_finite(layers: Mapping[str, nn.Module]) -> None:
    """Raise if the weight of one of these layers, by name, has numbers that no mask makes zero and no scale holds.

    Raises:
        ModelError: a weight has NaN or infinity.
    """
    for name, layer in layers.items():
        weight: Tensor = layer._parameters["weight"]  # type: ignore[assignment]
        if not weight.is_meta and not torch.isfinite(weight.detach()).all():
            what = "NaN" if torch.isnan(weight.detach()).any() else "infinity"
            raise ModelError(f"layer {name!r}: its weight has {what}; finite numbers are needed")


def mask_layers(model: nn.Module, settings: Mapping[str, NofMSetting]) -> None:
    """Mask layers of a model itself; `check_settings` has passed."""
    layers = dict(model.named_modules())
    for name, setting in settings.items():
        mask_layer(layers[name], setting)
        _log.debug("%s: %d:%d mask, update_freq %d", name, setting.n, setting.m, setting.update_freq)
    keep_forwards(model, is_masked)


def masked_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of `model` that carry a mask, by name."""
    return {name: layer for name, layer in model.named_modules() if is_masked(layer)}


def masks_of(model: nn.Module) -> dict[str, BoolArray]:
    """The masks in force, True where a weight stays, each of the shape of its weight.

    A layer that never ran gets the mask that its first forward would choose.
    """
    result = {}
    for name, layer in masked_layers(model).items():
        mask = state_of(layer).current(layer._parameters["weight"])  # type: ignore[arg-type]
        result[name] = mask.cpu().numpy().astype(np.bool_)
    return result


def load_masks(model: nn.Module, masks: Mapping[str, Any]) -> None:
    """Put given masks in force, as if each had just been chosen. Nothing is changed when one does not fit.

    Args:
        model: a model from `apply_24`; all its masked layers must be named.
        masks: layer name -> booleans or 0 / 1 of the shape of the weight.

    Raises:
        RecordError: a name is missing or unknown, a shape differs, or a mask breaks its layer's pattern.
    """
    _check_module(model)
    if not isinstance(masks, Mapping):
        raise RecordError(f"masks is {kind_of_value(masks)}; a dict of layer names to masks is needed")
    layers = masked_layers(model)
    for name in masks:
        if name not in layers:
            raise RecordError(f"mask of {name!r}: the model has no such masked layer; {nearest(str(name), layers)}")
    taken = {}
    for name, layer in layers.items():
        if name not in masks:
            raise RecordError(f"there is no mask of the layer {name!r}")
        state = state_of(layer)
        mask = _as_array(name, masks[name])
        if mask.shape != tuple(state.mask.shape):
            raise RecordError(f"mask of {name!r} has shape {list(mask.shape)}; its weight has {list(state.mask.shape)}")
        if not np.isin(mask, (0, 1)).all():
            raise RecordError(f"mask of {name!r} has values other than 0 and 1")
        setting = state.setting
        # Masks of grouped transposed convolutions may come from a tool that runs groups of M straight on.
        results = [check(mask, state.axis, setting.n, setting.m, parts) for parts in {1, state.blocks}]
        if not any(results):
            raise RecordError(
                f"mask of {name!r} keeps more than {setting.n} of {setting.m} at {list(results[0].first or ())}"
            )
        taken[name] = mask.astype(np.bool_)
    for name, mask in taken.items():
        state = state_of(layers[name])
        state.set(torch.from_numpy(mask).to(state.mask.device))


def _as_array(name: str, mask: Any) -> np.ndarray:
    try:
        return np.array(mask.detach().cpu() if isinstance(mask, Tensor) else mask)
    except ValueError as error:
        raise RecordError(f"mask of {name!r} is no array of one shape: {one_line(error)}") from error


def finalize(model: nn.Module) -> nn.Module:
    """Copy a model with pruned weights exactly zero (positive zero) and all layers plain again.

    The masks are those in force, see `masks_of`. `model` is not changed.

    Raises:
        UnsupportedModelError: no module, or a layer simulates quantisation; its integers have to be made from both.
    """
    _check_module(model)
    for name, layer in masked_layers(model).items():
        if hasattr(type(layer), "_openwork_inner"):
            raise UnsupportedModelError(
                f"layer {name!r} simulates quantisation; save_compressed_retrain_model saves it"
            )
    result = copy_model(model)
    for layer in masked_layers(result).values():
        weight: Tensor = layer._parameters["weight"]  # type: ignore[assignment]
        apply_mask_(weight, state_of(layer).current(weight))
        unmask_layer(layer)
    free_forwards(result)
    return result


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise wrong_model("model", model, "a torch.nn.Module")


def _check_model(model: nn.Module) -> None:
    _check_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModelError("model is a ScriptModule; the Python module that it was made from is needed")
    for name, layer in model.named_modules():
        if is_masked(layer):
            raise UnsupportedModelError(f"layer {name!r} carries a mask already; finalize the model first")
        kind = type(layer).__module__
        if kind.startswith(("torch.ao.nn.", "torch.nn.quantized", "torch.nn.intrinsic", "torch.nn.qat")):
            raise UnsupportedModelError(
                f"layer {name!r} is a quantised {type(layer).__name__}; masks go on the float model"
            )


def through_forward(module: nn.Module, arguments: Any) -> None:
    """Does nothing; see `keep_forwards`."""


def keep_forwards(model: nn.Module, wrapped: Callable[[nn.Module], bool]) -> None:
    """Make transformer layers call the forward of wrapped layers inside them.

    In evaluation `TransformerEncoderLayer` takes a short cut that reads the weights of its linear layers. It
    does not when a layer in it has a hook.
    """
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            for inner in layer.modules():
                if wrapped(inner) and through_forward not in inner._forward_pre_hooks.values():
                    inner.register_forward_pre_hook(through_forward)


def free_forwards(model: nn.Module) -> None:
    """Undo `keep_forwards`."""
    for layer in model.modules():
        for key in [key for key, hook in layer._forward_pre_hooks.items() if hook is through_forward]:
            del layer._forward_pre_hooks[key]


def copy_model(model: nn.Module) -> nn.Module:
    """A copy with weights of its own. Weights that hooks compute (weight norm) and that a backward has passed do not
    hinder it, as they do copy.deepcopy.

    Raises:
        UnsupportedModelError: the model holds what cannot be copied (says where).
    """
    return copy_structure(model, lambda name, tensor: tensor.detach().clone())
