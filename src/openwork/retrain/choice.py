"""Which units of which groups a config removes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from openwork import importance as criteria
from openwork.config import LayerSetting, RetrainConfig
from openwork.graph.groups import IntArray, PruneGroup, Role
from openwork.graph.plan import GroupCut
from openwork.graph.select import balanced, lowest, removable, sparing
from openwork.importance import ArraySource

__all__ = ["choose_units", "is_skipped", "report_choice", "whole_modules", "why_nothing_goes"]

_LOG = logging.getLogger("openwork")
_SKIPS = ("skip_layers", "regular_prune_skip_layers", "skip_layer_types", "regular_prune_skip_types")

# From a member's parameter and module to the names of all layers that have it (tied weights have several).
Owners = Callable[[str, str], Sequence[str]]


def whole_modules(config: RetrainConfig, paths: Collection[str], separator: str = ".") -> RetrainConfig:
    """The config in which a skip of a module (or scope) skips all layers inside it."""

    def below(names: tuple[str, ...]) -> tuple[str, ...]:
        inside = [path for path in paths for name in names if path.startswith(f"{name}{separator}")]
        return tuple(dict.fromkeys([*names, *inside]))

    return replace(
        config,
        skip_layers=below(config.skip_layers),
        regular_prune_skip_layers=below(config.regular_prune_skip_layers),
        quant_skip_layers=below(config.quant_skip_layers),
    )


def is_skipped(setting: LayerSetting) -> bool:
    """Whether the config skips the layer, so that nothing tied to it may go either."""
    return setting.prune is None and setting.reason.partition(" ")[0] in _SKIPS


def group_setting(group: PruneGroup, settings: Mapping[str, LayerSetting], owners: Owners) -> tuple[float, bool]:
    """Ratio and alignment of tied layers: the smallest of the ratios, aligned if any asks; 0 if one is skipped."""
    found = [
        settings[path]
        for member in group.producers
        for path in owners(member.parameter, member.module)
        if path in settings
    ]
    asked = [setting.channels for setting in found if setting.channels is not None]
    if not asked or any(is_skipped(setting) for setting in found):
        return 0.0, False
    return min(channels.ratio for channels in asked), any(channels.aligned for channels in asked)


def choose_units(
    groups: Sequence[PruneGroup],
    settings: Mapping[str, LayerSetting],
    remembered: Mapping[str, IntArray],
    weights: ArraySource,
    owners: Owners,
) -> dict[int, IntArray]:
    """Units to remove from each group.

    Args:
        groups: the model's groups.
        settings: what the config says of each layer.
        remembered: channels that a search chose, by layer; they go before any ranking.
        weights: arrays by parameter name.
        owners: the layers that have a parameter.
    """
    criterion = criteria.get("balanced_l2")
    chosen: dict[int, IntArray] = {}
    for group in groups:
        ratio, aligned = group_setting(group, settings, owners)
        if ratio <= 0:
            continue
        exact = remembered_units(group, remembered)
        if exact is not None:
            chosen[group.index] = exact
            continue
        count = removable(group, ratio, 16 if aligned else 1)
        if count:
            chosen[group.index] = lowest(group, np.asarray(criterion.score(group, weights)), count)
    return sparing(groups, chosen)


def remembered_units(group: PruneGroup, remembered: Mapping[str, IntArray]) -> IntArray | None:
    """The units that a search chose for a group; None if it chose none, or they do not fit the group."""
    for member in group.producers:
        positions = remembered.get(member.module)
        if positions is None:
            continue
        gone = np.isin(member.positions, positions)
        units = np.unique(member.units[gone])
        whole = np.isin(member.units, units)
        if bool((whole == gone).all()) and balanced(group, units.astype(np.int64)):
            return units.astype(np.int64)
        _LOG.warning("channels that a search chose for %s do not fit its groups; they are ranked anew", member.module)
    return None


def why_nothing_goes(
    groups: Sequence[PruneGroup],
    settings: Mapping[str, LayerSetting],
    source: Any,
    layer_of: Callable[[str], str],
    why_kept: Callable[[str], str],
) -> str:
    """Words for the error when a config leads to an empty plan.

    Args:
        groups: the model's groups.
        settings: what the config says of each layer.
        source: the config file.
        layer_of: from a member's module to the layer's name in `settings`.
        why_kept: why a layer that no group has cannot lose channels.
    """
    asked = [name for name, setting in settings.items() if setting.channels is not None]
    if not asked:
        reasons = sorted({setting.reason for setting in settings.values() if is_skipped(setting)})
        why = "; ".join(reasons[:3]) or "none is named"
        return f"{source}: nothing is pruned: no layer that can be pruned is left ({why})"
    tied = {layer_of(member.module): group for group in groups for member in group.producers}
    name = next((name for name in asked if name in tied), None)
    if name is None:
        return f"{source}: nothing is pruned: {asked[0]!r} cannot lose channels: {why_kept(asked[0])}"
    for member in tied[name].producers:
        layer = layer_of(member.module)
        if layer in settings and is_skipped(settings[layer]):
            why = f"{name!r} is tied to {layer!r}, and {settings[layer].reason}"
            return f"{source}: nothing is pruned: {why}"
    setting = settings[name].channels
    assert setting is not None
    return (
        f"{source}: nothing is pruned: prune_ratio {setting.ratio} leaves all {tied[name].units} channels of {name!r}"
        + (" (ascend_optimized rounds up to a multiple of 16)" if setting.aligned else "")
    )


def report_choice(
    cuts: Sequence[GroupCut],
    produced: Collection[str],
    settings: Mapping[str, LayerSetting],
    why_kept: Callable[[str], str],
) -> None:
    """Log what each group loses, and why layers that the config asks for lose nothing.

    Args:
        cuts: the plan's groups.
        produced: layers that make the channels of some group.
        settings: what the config says of each layer.
        why_kept: why a layer that no group has cannot lose channels.
    """
    for group in cuts:
        names = [cut.module for cut in group.cuts if cut.role is Role.PRODUCES]
        _LOG.info("%s: %d of %d channels stay", ", ".join(dict.fromkeys(names)), group.units_after, group.units_before)
    for name, setting in settings.items():
        if setting.channels is not None and name not in produced:
            _LOG.info("%s keeps all its channels: %s", name, why_kept(name))
