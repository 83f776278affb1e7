"""The channels that a search chose, remembered in the config file as comments.

Each searched layer has a line ``# openwork-channels: <layer> of <total> remove <ranges> digest <hex>``.
To every other reader it is a comment. The digest covers the layer's ratio and alignment, as they stand in the
file after resolution, and the channels themselves; once a person edits either, the line no longer counts and
the layer's channels are ranked anew. Layers that were not edited keep their chosen channels.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from openwork.config.settings import ChannelSetting
from openwork.errors import ConfigError
from openwork.indices import format_ranges, parse_ranges
from openwork.prototext import exact_decimal, format_float

__all__ = ["ChosenChannels", "read_chosen_channels", "write_chosen_channels"]

_PREFIX = "# openwork-channels: "
_LINE = re.compile(r"(?P<layer>.+?) of (?P<total>\d{1,18}) remove (?P<ranges>\S*) ?digest (?P<digest>\S+)")


@dataclass(frozen=True, eq=False)
class ChosenChannels:
    """What `read_chosen_channels` found.

    Attributes:
        removed: int64 positions to remove, ascending, by layer; only layers whose line still counts.
        totals: the number of channels each of these layers had when they were chosen.
        stale: why a line does not count, by layer.
    """

    removed: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    stale: dict[str, str] = field(default_factory=dict)


def write_chosen_channels(
    text: str,
    removed: Mapping[str, npt.ArrayLike],
    totals: Mapping[str, int],
    settings: Mapping[str, ChannelSetting],
) -> str:
    """Put the chosen channels into the text of a config.

    Args:
        text: the config; lines of an earlier search are replaced.
        removed: positions to remove, strictly ascending, by layer.
        totals: channels of each of these layers.
        settings: the setting that resolves for each of them from `text`.

    Returns:
        The text with one comment line for each layer at its end.

    Raises:
        ConfigError: positions out of range or not ascending, or not as many as the setting keeps.
    """
    lines = [line for line in text.splitlines() if not line.startswith(_PREFIX)]
    for layer, positions in removed.items():
        total = totals[layer]
        try:
            ranges = format_ranges(positions)
            parse_ranges(ranges, total)
        except ValueError as error:
            raise ConfigError(f"chosen channels of {layer!r}: {error}") from error
        digest = _digest(layer, total, ranges, settings[layer])
        lines.append(f"{_PREFIX}{layer} of {total} remove {ranges} digest {digest}")
    return "".join(line + "\n" for line in lines)


def read_chosen_channels(text: str, settings: Mapping[str, ChannelSetting | None]) -> ChosenChannels:
    """Read the chosen channels of a config back.

    Args:
        text: the config file's content.
        settings: the setting that resolves for each layer now; None or absent where it is not pruned.

    Returns:
        The channels of every layer whose line and setting are as the search wrote them.
    """
    result = ChosenChannels()
    for line in text.splitlines():
        if not line.startswith(_PREFIX):
            continue
        content = line[len(_PREFIX) :].strip()
        match = _LINE.fullmatch(content)
        layer = match["layer"] if match else content.partition(" ")[0]
        removed = _positions(match, settings.get(layer)) if match else "the line is damaged"
        if layer in result.removed or layer in result.stale:
            removed = "the layer has two lines"
            result.removed.pop(layer, None)
            result.totals.pop(layer, None)
        if isinstance(removed, str):
            result.stale[layer] = removed
        elif match:
            result.removed[layer] = removed
            result.totals[layer] = int(match["total"])
    return result


def _positions(match: re.Match[str], setting: ChannelSetting | None) -> npt.NDArray[np.int64] | str:
    """The positions of a line, or why it does not count."""
    if setting is None:
        return "the layer is not pruned any more"
    total = int(match["total"])
    if _digest(match["layer"], total, match["ranges"], setting) != match["digest"]:
        return "its ratio, alignment or channels were edited"
    try:
        return parse_ranges(match["ranges"], total)
    except ValueError as error:
        return str(error)


def _digest(layer: str, total: int, ranges: str, setting: ChannelSetting) -> str:
    content = "\n".join((layer, str(total), ranges, format_float(exact_decimal(setting.ratio)), str(setting.aligned)))
    return hashlib.sha256(content.encode()).hexdigest()[:16]
