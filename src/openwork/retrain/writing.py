"""From chosen units to the config file: ratios that AMCT reads, channels that openwork reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from openwork.config import (
    ChannelSetting,
    LayerOverride,
    RetrainConfig,
    dump_retrain_config,
    ratio_of,
    write_chosen_channels,
)
from openwork.graph.groups import IntArray, PruneGroup

__all__ = ["config_text"]


def config_text(
    override: RetrainConfig,
    layers: Mapping[str, int],
    groups: Sequence[PruneGroup],
    removed: Mapping[int, IntArray],
    aligned: bool,
) -> str:
    """The config that prunes what a search chose.

    Args:
        override: content of the file that ``override_prune_cfg`` names; all of it is kept.
        layers: output channels of each layer that the search could have pruned, in the model's order.
        groups: the groups of the analysis that were searched.
        removed: group index -> units to remove.
        aligned: what ``ascend_optimized`` says.

    Returns:
        the override's content; a ratio, 1 - kept / total, for each layer that loses channels, the channels
        themselves as comments; every other layer skipped; a global ``prune_config``, which no layer is left to.
    """
    gone: dict[str, list[IntArray]] = {}
    for group in groups:
        units = removed.get(group.index)
        if units is None or not len(units):
            continue
        for member in group.producers:
            if member.module in layers:
                gone.setdefault(member.module, []).append(member.positions[np.isin(member.units, units)])
    positions = {name: np.unique(np.concatenate(gone[name])) for name in layers if name in gone}
    settings = {
        name: ChannelSetting(ratio_of(layers[name], layers[name] - len(index)), aligned)
        for name, index in positions.items()
    }
    named = {item.name for item in override.override_layer_configs}
    skipped = [
        name
        for name in layers
        if name not in settings and name not in named and name not in override.regular_prune_skip_layers
    ]
    total = sum(layers[name] for name in layers)
    lost = sum(len(index) for index in positions.values())
    config = replace(
        override,
        prune_config=ChannelSetting(ratio_of(total, total - lost), aligned) if lost else None,
        override_layer_configs=(
            *override.override_layer_configs,
            *(LayerOverride(name, prune=setting) for name, setting in settings.items()),
        ),
        regular_prune_skip_layers=(*override.regular_prune_skip_layers, *skipped),
    )
    return write_chosen_channels(dump_retrain_config(config), positions, layers, settings)
