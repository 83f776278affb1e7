"""Sparse weights without training, from a few batches: magnitude, Wanda or SparseGPT for each layer in turn."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from openwork.config import NofMSetting
from openwork.errors import ConfigError, ModelError, nearest, wrong_model
from openwork.errors import kind_of as kind_of_value
from openwork.sparsity.masks import apply_mask_, nm_mask
from openwork.sparsity.oneshot import METHODS, sparse_gpt, wanda
from openwork.torch.sparse24.apply import check_settings, copy_model, maskable_layers
from openwork.torch.sparse24.layers import kind_of
from openwork.torch.structure import one_line

__all__ = ["one_shot"]


def one_shot(
    model: nn.Module,
    batches: Iterable[Any] = (),
    method: str = "magnitude",
    layers: Sequence[str] | None = None,
    n: int = 2,
    m: int = 4,
    damping: float = 0.01,
) -> nn.Module:
    """Copy a model and make its weights N:M sparse at once.

    Layers are done in the order in which the model runs them, each from the inputs that the sparse layers before
    it give.

    Args:
        model: a trained model; it is not changed.
        batches: calibration inputs, each a tensor or a tuple of positional arguments; a tensor in place of all is
            one batch; not needed for magnitude.
        method: ``magnitude``, ``wanda`` or ``sparsegpt``, see `openwork.sparsity.oneshot`.
        layers: names of layers; None: all that can hold the mask.
        n: weights kept of each group.
        m: size of a group.
        damping: of SparseGPT: added to the second moment's diagonal, as a share of its mean.

    Returns:
        The sparse copy, all layers plain, in evaluation mode.

    Raises:
        ConfigError: no such method, a layer that cannot hold the mask, or damping that is not positive.
        ModelError: a method that needs batches got none, the forward fails on one, or a batch, a weight or the input
            of a layer has NaN or infinity.
    """
    if not isinstance(model, nn.Module):
        raise wrong_model("model", model, "a torch.nn.Module")
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"method is {method!r}; {nearest(str(method), METHODS)}")
    if not isinstance(damping, (int, float)) or not 0 < damping < math.inf:
        raise ConfigError(f"damping is {damping!r}; it must be greater than 0 and finite")
    setting = NofMSetting(n=n, m=m)
    names = [name for name, why in maskable_layers(model, n, m).items() if not why] if layers is None else list(layers)
    check_settings(model, dict.fromkeys(names, setting))
    result = copy_model(model).eval()
    modules = dict(result.named_modules())
    if method == "magnitude":
        for name in names:
            _by_magnitude(modules[name], n, m)
        return result
    if isinstance(batches, Tensor):
        batches = (batches,)
    if not isinstance(batches, Iterable):
        raise ConfigError(
            f"batches is {kind_of_value(batches)}; an iterable of tensors, or of tuples of them, is needed"
        )
    held = [batch if isinstance(batch, (tuple, list)) else (batch,) for batch in batches]
    for number, batch in enumerate(held):
        for value in batch:
            if isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
                raise ModelError(f"calibration batch {number} has NaN or infinity; finite numbers are needed")
    if not held:
        raise ModelError(f"method {method!r} needs at least one batch of inputs")
    order = _order(result, held, {name: modules[name] for name in names})
    for name in names:
        if name not in order:
            # The batches do not reach it: nothing but its weights is known.
            _by_magnitude(modules[name], n, m)
    for name in _progress(order, f"{method} one-shot"):
        layer = modules[name]
        moments = _moments(result, name, layer, held, m)
        _update(layer, moments, method, n, m, damping)
    return result


def _progress(names: Sequence[str], text: str) -> Iterable[str]:
    """A progress bar, if anybody is watching."""
    if not sys.stderr.isatty():
        return names
    from rich.console import Console
    from rich.progress import track

    return track(names, text, console=Console(stderr=True))


@torch.no_grad()
def _order(model: nn.Module, batches: Sequence[Sequence[Any]], layers: dict[str, nn.Module]) -> list[str]:
    """Layers in the order in which they run; each batch is tried."""
    names = {id(layer): name for name, layer in layers.items()}
    order: list[str] = []

    def seen(layer: nn.Module, arguments: Any) -> None:
        if names[id(layer)] not in order:
            order.append(names[id(layer)])

    hooks = [layer.register_forward_pre_hook(seen) for layer in layers.values()]
    try:
        for number, batch in enumerate(batches):
            try:
                model(*batch)
            except Exception as error:  # whatever the model's own code raises
                raise ModelError(
                    f"the forward of {type(model).__name__} fails on calibration batch {number}, of {len(batch)} "
                    f"arguments: {one_line(error)}"
                ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return order


@torch.no_grad()
def _moments(model: nn.Module, name: str, layer: nn.Module, batches: Sequence[Sequence[Any]], m: int) -> list[Tensor]:
    """X^T X of the layer's features, one [columns, columns] for each convolution group."""
    sums: list[Tensor] = []

    def collect(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs.get("input", next(iter(kwargs.values())))
        for group, features in enumerate(_features(layer, x.detach(), m)):
            product = features.t().double() @ features.double()
            if group < len(sums):
                sums[group] += product
            else:
                sums.append(product)

    hooks = [layer.register_forward_pre_hook(collect, with_kwargs=True)]
    try:
        for batch in batches:
            model(*batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not all(torch.isfinite(total).all() for total in sums):
        raise ModelError(f"layer {name!r}: its inputs have NaN or infinity for these batches; nothing can be measured")
    return sums


def _groups(layer: Any) -> int:
    return int(getattr(layer, "groups", 1))


def _pad_columns(values: Tensor, m: int) -> Tensor:
    """Zero columns after the last input channel, so that groups of m end with each kernel place."""
    return functional.pad(values, (0, -values.shape[-1] % m))


def _features(layer: Any, x: Tensor, m: int) -> list[Tensor]:
    """Rows that the weight matrices of `_matrices` multiply: [samples, columns] for each group."""
    if isinstance(layer, nn.Linear):
        return [_pad_columns(x.reshape(-1, x.shape[-1]), m)]
    if x.dim() == 3:
        x = x.unsqueeze(0)
    groups = _groups(layer)
    if isinstance(layer, nn.ConvTranspose2d):
        return [_pad_columns(part.flatten(2).transpose(1, 2).flatten(0, 1), m) for part in x.chunk(groups, 1)]
    padding = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = functional.pad(x, padding, mode=mode) if any(padding) else x
    result = []
    for part in x.chunk(groups, 1):
        windows = functional.unfold(part, layer.kernel_size, layer.dilation, 0, layer.stride)
        places = windows.shape[1] // part.shape[1]
        rows = windows.reshape(part.shape[0], part.shape[1], places, -1).permute(0, 3, 2, 1)
        result.append(_pad_columns(rows, m).flatten(2).flatten(0, 1))
    return result


def _matrices(layer: Any, weight: Tensor, m: int) -> list[Tensor]:
    """The weight as matrices [rows, columns], input channels side by side within each kernel place."""
    if isinstance(layer, nn.Linear):
        return [_pad_columns(weight, m)]
    if isinstance(layer, nn.ConvTranspose2d):
        return [_pad_columns(part.flatten(1).t(), m) for part in weight.chunk(_groups(layer), 0)]
    return [_pad_columns(part.permute(0, 2, 3, 1), m).flatten(1) for part in weight.chunk(_groups(layer), 0)]


def _from_matrices(layer: Any, matrices: Sequence[Tensor], shape: torch.Size, m: int) -> Tensor:
    """The inverse of `_matrices`."""
    if isinstance(layer, nn.Linear):
        return matrices[0][:, : shape[1]]
    if isinstance(layer, nn.ConvTranspose2d):
        inputs = shape[0] // _groups(layer)
        return torch.cat([part[:, :inputs].t().reshape(inputs, *shape[1:]) for part in matrices])
    padded = shape[1] + -shape[1] % m
    parts = [part.reshape(-1, *shape[2:], padded)[..., : shape[1]].permute(0, 3, 1, 2) for part in matrices]
    return torch.cat(parts)


@torch.no_grad()
def _update(layer: Any, moments: Sequence[Tensor], method: str, n: int, m: int, damping: float) -> None:
    weight: Tensor = layer.weight
    results = []
    for matrix, moment in zip(_matrices(layer, weight.detach().double().cpu(), m), moments):
        values = matrix.numpy()
        if method == "wanda":
            mask = wanda(values, np.sqrt(moment.diagonal().cpu().numpy()), n, m)
            values = np.where(mask, values, 0.0)
        else:
            values, _ = sparse_gpt(values, moment.cpu().numpy(), n, m, damping)
        results.append(torch.from_numpy(np.ascontiguousarray(values)))
    weight.copy_(_from_matrices(layer, results, weight.shape, m))


@torch.no_grad()
def _by_magnitude(layer: Any, n: int, m: int) -> None:
    kind = kind_of(layer)
    assert kind is not None
    apply_mask_(layer.weight, nm_mask(layer.weight, n, m, kind.axis, kind.blocks(layer)))
