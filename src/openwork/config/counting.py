"""How many channels a ratio keeps."""

from __future__ import annotations

import math

from openwork.errors import ConfigError

__all__ = ["ALIGNMENT", "kept_channels", "ratio_of"]

ALIGNMENT = 16
"""Channels that AMCT's ``ascend_optimized`` rounds up to."""


def kept_channels(total: int, ratio: float, aligned: bool = False, blocks: int = 1, multiple: int = ALIGNMENT) -> int:
    """Number of channels that stay when a share `ratio` of `total` is to go.

    ``total - round(total * ratio)`` with Python's rounding of halves to even; if `aligned`, rounded up to a
    multiple of `multiple` (at least one, at most `total`); with `blocks` tied blocks, rounded down to a multiple
    of them; never below `blocks`. A result of `total` prunes nothing.

    A native ``round_to=k`` is ``kept_channels(total, ratio, aligned=True, multiple=k)``.

    Args:
        total: channels of the layer, at least 1.
        ratio: share to remove, in [0, 1).
        aligned: round up to `multiple`.
        blocks: number of equal blocks that must lose the same number of channels; divides `total`.
        multiple: what `aligned` rounds up to, at least 1.

    Returns:
        Channels kept, a multiple of `blocks`, in ``[blocks, total]``.

    Raises:
        ConfigError: an argument is out of its range.
    """
    if total < 1:
        raise ConfigError(f"total is {total}; a layer has at least 1 channel")
    if not (math.isfinite(ratio) and 0.0 <= ratio < 1.0):
        raise ConfigError(f"ratio is {ratio}; it must be at least 0 and less than 1")
    if multiple < 1:
        raise ConfigError(f"round_to is {multiple}; it must be at least 1")
    if blocks < 1 or total % blocks:
        raise ConfigError(f"blocks is {blocks}; it must divide the {total} channels")
    kept = total - round(total * ratio)
    if aligned:
        kept = min(total, -(-max(kept, 1) // multiple) * multiple)
    return max(blocks, kept - kept % blocks)


def ratio_of(total: int, kept: int) -> float:
    """The shortest ratio that a config can hold and that keeps exactly `kept` of `total` channels.

    Decimals are added until ``kept_channels(total, ratio)`` gives `kept` back, so that a file shows 0.25 or
    0.333 rather than seventeen digits. For ``kept == total`` it is 0, which a config cannot hold.

    Raises:
        ConfigError: `kept` is not in ``1..total``.
    """
    if not 1 <= kept <= total:
        raise ConfigError(f"kept is {kept}; it must be in 1..{total}")
    removed = total - kept
    for digits in range(2, 9):
        ratio = round(removed / total, digits)
        # A quarter of a channel is left for the rounding to the float32 of the file.
        if ratio < 1 and abs(total * ratio - removed) <= 0.25 and (ratio > 0 or not removed):
            return ratio
    return removed / total
