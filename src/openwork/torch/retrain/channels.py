"""What a config means for the channels of a model: settings of layers, groups, ranking, plan."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from openwork import importance as criteria
from openwork.config import (
    PYTORCH_TYPES,
    LayerSetting,
    NofMSetting,
    QuantSetting,
    RetrainConfig,
    read_chosen_channels,
    resolve,
)
from openwork.graph.groups import IntArray, PruneGroup, Role
from openwork.graph.select import balanced, lowest, removable
from openwork.torch.analysis import Analysis
from openwork.torch.prune import PrunePlan, weights_of

__all__ = ["choose", "masks_asked", "plan_channels", "quantisation_asked", "report", "settings_of", "why_nothing"]

_LOG = logging.getLogger("openwork")
_SKIPS = ("skip_layers", "regular_prune_skip_layers", "skip_layer_types", "regular_prune_skip_types")


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


def _whole_modules(config: RetrainConfig, paths: Collection[str]) -> RetrainConfig:
    """The config in which a skip of a module skips all layers inside it."""

    def below(names: tuple[str, ...]) -> tuple[str, ...]:
        inside = [path for path in paths for name in names if path.startswith(f"{name}.")]
        return tuple(dict.fromkeys([*names, *inside]))

    return replace(
        config,
        skip_layers=below(config.skip_layers),
        regular_prune_skip_layers=below(config.regular_prune_skip_layers),
        quant_skip_layers=below(config.quant_skip_layers),
    )


def settings_of(config: RetrainConfig, analysis: Analysis) -> dict[str, LayerSetting]:
    """What the config says of every layer of the model."""
    modules = {name: module for name, module in analysis.model.named_modules() if name}
    named = {*config.skip_layer_types, *config.regular_prune_skip_types, *config.quant_skip_types}
    named.update(override.name for override in config.override_layer_types)
    producers = {_layer(member.module) for group in analysis.groups for member in group.producers}
    plain = {name: module for name, module in modules.items() if not _is_depthwise(module)}
    prunable = [name for name, module in plain.items() if isinstance(module, (nn.Conv2d, nn.Linear))]
    return resolve(
        _whole_modules(config, modules),
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
        _whole_modules(config, modules),
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


def _group_setting(
    group: PruneGroup, settings: Mapping[str, LayerSetting], owners: Mapping[str, list[str]]
) -> tuple[float, bool]:
    """Ratio and alignment of tied layers: the smallest of the ratios, aligned if any asks; 0 if one is skipped."""
    found = [
        settings[path]
        for member in group.producers
        for path in owners.get(member.parameter, [_layer(member.module)])
        if path in settings
    ]
    asked = [setting.channels for setting in found if setting.channels is not None]
    if not asked or any(_skipped(setting) for setting in found):
        return 0.0, False
    return min(channels.ratio for channels in asked), any(channels.aligned for channels in asked)


def _skipped(setting: LayerSetting) -> bool:
    return setting.prune is None and setting.reason.partition(" ")[0] in _SKIPS


def choose(
    analysis: Analysis, settings: Mapping[str, LayerSetting], remembered: Mapping[str, IntArray]
) -> dict[int, IntArray]:
    """Units to remove from each group.

    Args:
        analysis: the model's groups.
        settings: what the config says of each layer.
        remembered: channels that a search chose, by layer; they go before any ranking.
    """
    criterion = criteria.get("balanced_l2")
    weights = weights_of(analysis.model)
    owners = _owners(analysis.model)
    chosen: dict[int, IntArray] = {}
    for group in analysis.groups:
        ratio, aligned = _group_setting(group, settings, owners)
        if ratio <= 0:
            continue
        exact = _remembered_units(group, remembered)
        if exact is not None:
            chosen[group.index] = exact
            continue
        count = removable(group, ratio, 16 if aligned else 1)
        if count:
            chosen[group.index] = lowest(group, np.asarray(criterion.score(group, weights)), count)
    return {index: units for index, units in chosen.items() if len(units)}


def _remembered_units(group: PruneGroup, remembered: Mapping[str, IntArray]) -> IntArray | None:
    for member in group.producers:
        positions = remembered.get(member.module)
        if positions is None:
            continue
        gone = np.isin(member.positions, positions)
        units = np.unique(member.units[gone])
        whole = np.isin(member.units, units)
        if bool((whole == gone).all()) and balanced(group, units.astype(np.int64)):
            return units.astype(np.int64)
        _LOG.warning("the channels remembered for %s do not fit this model; they are ranked anew", member.module)
    return None


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
        found = analysis.plan(chosen)
        if found is not None:
            return PrunePlan(*found), settings


def why_nothing(analysis: Analysis, settings: Mapping[str, LayerSetting], source: Any) -> str:
    """Words for the error when a config leads to an empty plan."""
    asked = [name for name, setting in settings.items() if setting.channels is not None]
    if not asked:
        reasons = sorted({setting.reason for setting in settings.values() if _skipped(setting)})
        why = "; ".join(reasons[:3]) or "none is named"
        return f"{source}: nothing is pruned: no layer that can be pruned is left ({why})"
    tied = {_layer(member.module): group for group in analysis.groups for member in group.producers}
    name = next((name for name in asked if name in tied), None)
    if name is None:
        return f"{source}: nothing is pruned: {asked[0]!r} cannot lose channels: {_why_kept(analysis, asked[0])}"
    for member in tied[name].producers:
        if _layer(member.module) in settings and _skipped(settings[_layer(member.module)]):
            why = f"{name!r} is tied to {_layer(member.module)!r}, and {settings[_layer(member.module)].reason}"
            return f"{source}: nothing is pruned: {why}"
    setting = settings[name].channels
    assert setting is not None
    return (
        f"{source}: nothing is pruned: prune_ratio {setting.ratio} leaves all {tied[name].units} channels of {name!r}"
        + (" (ascend_optimized rounds up to a multiple of 16)" if setting.aligned else "")
    )


def report(analysis: Analysis, plan: PrunePlan, settings: Mapping[str, LayerSetting]) -> None:
    """Log what each group loses, and why layers that the config asks for lose nothing."""
    for group in plan.groups:
        names = [cut.parameter.rpartition(".")[0] for cut in group.cuts if cut.role is Role.PRODUCES]
        _LOG.info("%s: %d of %d channels stay", ", ".join(dict.fromkeys(names)), group.units_after, group.units_before)
    produced = {_layer(member.module) for group in analysis.groups for member in group.producers}
    for name, setting in settings.items():
        if setting.channels is not None and name not in produced:
            _LOG.info("%s keeps all its channels: %s", name, _why_kept(analysis, name))


def _why_kept(analysis: Analysis, layer: str) -> str:
    """Why no output channel of a layer may go."""
    for frozen in analysis.frozen:
        # The output axis of a transposed convolution's weight is the second one; all have it in their bias.
        if any((n == f"{layer}.weight" and axis == 0) or n == f"{layer}.bias" for n, axis, _ in frozen.members):
            return frozen.reason
    return "no other layer reads them, or the forward pass does not run it"
