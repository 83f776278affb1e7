"""What a config means for the channels of a model: settings of layers, groups, ranking, plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from openwork.config import (
    PYTORCH_TYPES,
    LayerSetting,
    NofMSetting,
    QuantSetting,
    RetrainConfig,
    read_chosen_channels,
    resolve,
)
from openwork.graph.groups import IntArray
from openwork.retrain.choice import choose_units, report_choice, whole_modules, why_nothing_goes
from openwork.torch.analysis import Analysis
from openwork.torch.prune import PrunePlan, plan_of, weights_of

__all__ = ["choose", "masks_asked", "plan_channels", "quantisation_asked", "report", "settings_of", "why_nothing"]

_LOG = logging.getLogger("openwork")


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd) and module.groups == module.in_channels and module.groups != 1


def _kind(module: nn.Module, named: set[str]) -> str:
    """The layer type that a config names a module by.

    A subclass (timm's Conv2dSame, attention's output projection) counts as the torch class it extends, unless the
    config names its own class.
    """
    own = type(module).__name__
    if own not in named:
        for base in (nn.Conv2d, nn.Linear, nn.ConvTranspose2d):
            if isinstance(module, base):
                return base.__name__
    return own


def settings_of(config: RetrainConfig, analysis: Analysis) -> dict[str, LayerSetting]:
    """What the config says of every layer of the model."""
    modules = {name: module for name, module in analysis.model.named_modules() if name}
    named = {*config.skip_layer_types, *config.regular_prune_skip_types, *config.quant_skip_types}
    named.update(override.name for override in config.override_layer_types)
    producers = {_layer(member.module) for group in analysis.groups for member in group.producers}
    plain = {name: module for name, module in modules.items() if not _is_depthwise(module)}
    prunable = [name for name, module in plain.items() if isinstance(module, (nn.Conv2d, nn.Linear))]
    return resolve(
        whole_modules(config, modules),
        {name: _kind(module, named) for name, module in modules.items()},
        prunable=prunable,
        maskable=[
            name for name, module in plain.items() if isinstance(module, (nn.Conv2d, nn.Linear, nn.ConvTranspose2d))
        ],
        quantizable=_quantizable(modules),
        prunable_on_request=[name for name in producers if name not in prunable],
        known_types=PYTORCH_TYPES,
    )


def _quantizable(modules: Mapping[str, nn.Module]) -> list[str]:
    return [name for name, module in modules.items() if isinstance(module, (nn.Conv2d, nn.Linear, nn.ConvTranspose2d))]


def _without_analysis(config: RetrainConfig, model: nn.Module) -> dict[str, LayerSetting]:
    """What the config says of layers, but for channels."""
    modules = {name: module for name, module in model.named_modules() if name}
    named = {*config.skip_layer_types, *config.regular_prune_skip_types, *config.quant_skip_types}
    named.update(override.name for override in config.override_layer_types)
    return resolve(
        whole_modules(config, modules),
        {name: _kind(module, named) for name, module in modules.items()},
        prunable=modules,
        maskable=_quantizable(modules),
        quantizable=_quantizable(modules),
        known_types=PYTORCH_TYPES,
    )


def masks_asked(config: RetrainConfig, model: nn.Module) -> dict[str, NofMSetting]:
    """The N:M settings of layers, without analysis."""
    settings = _without_analysis(config, model)
    return {name: setting.mask for name, setting in settings.items() if setting.mask is not None}


def quantisation_asked(config: RetrainConfig, model: nn.Module) -> dict[str, QuantSetting]:
    """The quantisation of layers, without analysis."""
    settings = _without_analysis(config, model)
    return {name: setting.quant for name, setting in settings.items() if setting.quant is not None}


def _layer(module: str) -> str:
    """Path of the layer that a module's parameters belong to: a parametrised weight is kept inside one."""
    return module.partition(".parametrizations.")[0]


def _owners(model: nn.Module) -> dict[str, list[str]]:
    """First name of each parameter -> paths of all modules that have it (tied weights have several)."""
    first: dict[int, str] = {}
    owners: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(first.setdefault(id(parameter), name), []).append(_layer(name.rpartition(".")[0]))
    return owners


def choose(
    analysis: Analysis, settings: Mapping[str, LayerSetting], remembered: Mapping[str, IntArray]
) -> dict[int, IntArray]:
    """Units to remove from each group.

    Args:
        analysis: the model's groups.
        settings: what the config says of each layer.
        remembered: channels that a search chose, by layer; they go before any ranking.
    """
    owners = _owners(analysis.model)
    return choose_units(
        analysis.groups,
        settings,
        remembered,
        weights_of(analysis.model),
        lambda parameter, module: owners.get(parameter, [_layer(module)]),
    )


def plan_channels(analysis: Analysis, config: RetrainConfig, text: str) -> tuple[PrunePlan, dict[str, LayerSetting]]:
    """The plan that a config asks for; empty if it asks for no channel pruning."""
    while True:
        settings = settings_of(config, analysis)
        remembered = read_chosen_channels(text, {name: s.channels for name, s in settings.items()})
        for layer, why in remembered.stale.items():
            _LOG.warning("channels that a search chose for %s are not used: %s", layer, why)
        chosen = choose(analysis, settings, remembered.removed)
        if not chosen:
            return PrunePlan(), settings
        plan = plan_of(analysis, chosen)
        if plan is not None:
            return plan, settings


def why_nothing(analysis: Analysis, settings: Mapping[str, LayerSetting], source: Any) -> str:
    """Words for the error when a config leads to an empty plan."""
    return why_nothing_goes(analysis.groups, settings, source, _layer, lambda name: _why_kept(analysis, name))


def report(analysis: Analysis, plan: PrunePlan, settings: Mapping[str, LayerSetting]) -> None:
    """Log what each group loses, and why layers that the config asks for lose nothing."""
    produced = {_layer(member.module) for group in analysis.groups for member in group.producers}
    report_choice(plan.groups, produced, settings, lambda name: _why_kept(analysis, name))


def _why_kept(analysis: Analysis, layer: str) -> str:
    """Why no output channel of a layer may go."""
    for frozen in analysis.frozen:
        # The output axis of a transposed convolution's weight is the second one; all have it in their bias.
        if any((n == f"{layer}.weight" and axis == 0) or n == f"{layer}.bias" for n, axis, _ in frozen.members):
            return frozen.reason
    return "no other layer reads them, or the forward pass does not run it"
