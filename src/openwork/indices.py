"""Sorted positions as short text: ``0-3,7,9-12``."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

__all__ = ["format_ranges", "parse_ranges"]

_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def format_ranges(positions: npt.ArrayLike) -> str:
    """Write ascending positions as comma-separated ranges, both ends included.

    Args:
        positions: integers [n], strictly ascending, at least 0.

    Raises:
        ValueError: not ascending, or negative.
    """
    array = np.asarray(positions, dtype=np.int64).reshape(-1)
    if not array.size:
        return ""
    steps = np.diff(array)
    if array[0] < 0 or (steps <= 0).any():
        raise ValueError("positions must be strictly ascending and at least 0")
    breaks = np.flatnonzero(steps > 1)
    starts = array[np.concatenate(([0], breaks + 1))].tolist()
    ends = array[np.concatenate((breaks, [array.size - 1]))].tolist()
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


def parse_ranges(text: str, size: int) -> npt.NDArray[np.int64]:
    """Read what `format_ranges` wrote.

    Args:
        text: the ranges; empty for no positions.
        size: positions must be below it; checked before anything of that length is made.

    Returns:
        int64 [n], strictly ascending.

    Raises:
        ValueError: malformed, not ascending, or out of range; the message says which part.
    """
    if not text:
        return np.empty(0, np.int64)
    if not _RANGES.fullmatch(text):
        raise ValueError(f"{_shorten(text)!r} is not a list of ranges such as 0-3,7")
    parts = [part.partition("-") for part in text.split(",")]
    try:
        starts = np.array([int(start) for start, _, _ in parts], np.int64)
        ends = np.array([int(end or start) for start, _, end in parts], np.int64)
    except OverflowError as error:
        raise ValueError(f"a position is not below {size}") from error
    if ends[-1] >= size or starts.max() >= size or ends.max() >= size:
        raise ValueError(f"position {max(starts.max(), ends.max())} is not below {size}")
    if (ends < starts).any() or (starts[1:] <= ends[:-1]).any():
        raise ValueError(f"{_shorten(text)!r} is not strictly ascending")
    lengths = ends - starts + 1
    # One arange for all ranges: shift each range's part to its start.
    offsets = np.repeat(starts - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    return np.arange(int(lengths.sum()), dtype=np.int64) + offsets


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
