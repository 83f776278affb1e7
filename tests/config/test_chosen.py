"""The channels of a search travel in the config file, and an edit of the file undoes them."""

from __future__ import annotations

import numpy as np
import pytest

from openwork.config import (
    ChannelSetting,
    ChosenChannels,
    LayerOverride,
    RetrainConfig,
    dump_retrain_config,
    parse_retrain_config,
    read_chosen_channels,
    resolve,
    write_chosen_channels,
)
from openwork.errors import ConfigError

LAYERS = {"conv1": "Conv2d", "layer1.0.conv2": "Conv2d", "odd name": "Linear"}
CONFIG = RetrainConfig(
    prune_config=ChannelSetting(0.3, False),
    override_layer_configs=(
        LayerOverride("conv1", ChannelSetting(0.25, False)),
        LayerOverride("layer1.0.conv2", ChannelSetting(0.5, False)),
        LayerOverride("odd name", ChannelSetting(1 - 2 / 3, False)),
    ),
)
REMOVED = {"conv1": [0, 1, 2, 15], "layer1.0.conv2": [1, 3, 5, 7], "odd name": [2]}
TOTALS = {"conv1": 16, "layer1.0.conv2": 8, "odd name": 3}


def settings(text: str) -> dict[str, ChannelSetting | None]:
    resolved = resolve(parse_retrain_config(text), LAYERS, prunable=tuple(LAYERS))
    return {name: item.channels for name, item in resolved.items()}


def written() -> str:
    plain = dump_retrain_config(CONFIG)
    given = {override.name: override.prune for override in CONFIG.override_layer_configs}
    return write_chosen_channels(plain, REMOVED, TOTALS, given)  # type: ignore[arg-type]


def read(text: str) -> ChosenChannels:
    return read_chosen_channels(text, settings(text))


def test_they_come_back() -> None:
    chosen = read(written())
    assert {name: positions.tolist() for name, positions in chosen.removed.items()} == REMOVED
    assert chosen.totals == TOTALS
    assert chosen.stale == {}


def test_to_a_parser_they_are_comments() -> None:
    assert parse_retrain_config(written()).override_layer_configs[0] == CONFIG.override_layer_configs[0]
    assert "# openwork-channels: conv1 of 16 remove 0-2,15 digest " in written()


def test_edited_ratio_counts_for_its_layer_only() -> None:
    chosen = read(written().replace("prune_ratio: 0.25", "prune_ratio: 0.5"))
    assert set(chosen.removed) == {"layer1.0.conv2", "odd name"}
    assert chosen.stale == {"conv1": "its ratio, alignment or channels were edited"}


def test_edited_alignment() -> None:
    chosen = read(written().replace("ascend_optimized: false", "ascend_optimized: true"))
    assert chosen.removed == {}
    assert set(chosen.stale) == set(LAYERS)


def test_skipped_since() -> None:
    chosen = read(written() + 'skip_layers: "conv1"\n')
    assert chosen.stale == {"conv1": "the layer is not pruned any more"}


@pytest.mark.parametrize(
    ("before", "after"),
    [("remove 0-2,15", "remove 0-3,15"), ("of 16", "of 32"), ("remove 0-2,15", "remove x"), (" digest ", " ")],
)
def test_edited_line(before: str, after: str) -> None:
    chosen = read(written().replace(before, after))
    assert "conv1" not in chosen.removed
    assert "conv1" in chosen.stale


def test_two_lines_for_a_layer() -> None:
    text = written()
    line = next(line for line in text.splitlines() if "conv1 of" in line)
    assert read(text + line).stale == {"conv1": "the layer has two lines"}


def test_spaces_and_line_ends_of_other_systems_do_not_matter() -> None:
    assert set(read(written().replace("\n", "  \r\n")).removed) == set(LAYERS)


def test_a_second_search_replaces_the_lines() -> None:
    given = {"conv1": ChannelSetting(0.25, False)}
    text = write_chosen_channels(written(), {"conv1": np.arange(4)}, TOTALS, given)
    chosen = read(text)
    assert {name: positions.tolist() for name, positions in chosen.removed.items()} == {"conv1": [0, 1, 2, 3]}


def test_no_channel_removed() -> None:
    text = write_chosen_channels(dump_retrain_config(CONFIG), {"conv1": []}, TOTALS, settings(written()))  # type: ignore[arg-type]
    assert read(text).removed["conv1"].size == 0


@pytest.mark.parametrize("positions", [[16], [-1], [3, 2], [1, 1]])
def test_impossible_channels(positions: list[int]) -> None:
    with pytest.raises(ConfigError, match="chosen channels of 'conv1'"):
        write_chosen_channels("", {"conv1": positions}, TOTALS, {"conv1": ChannelSetting(0.25)})
