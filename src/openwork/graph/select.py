"""Which units of a group go: counting, rounding, ranking, blocks."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from openwork.graph.groups import IntArray, PruneGroup

__all__ = ["channels_per_unit", "lowest", "removable"]


def channels_per_unit(group: PruneGroup) -> int:
    """Output channels that one unit stands for: the smallest over the layers that produce it."""
    return max(1, min((round(member.multiplicity) for member in group.producers), default=1))


def removable(group: PruneGroup, ratio: float, round_to: int = 1) -> int:
    """How many units go from each block.

    ``units - round(units * ratio)`` units stay (halves to even, as Python rounds), rounded up until their
    channels are a multiple of `round_to`, then down to the same number in every block, but never none.

    Args:
        group: the group.
        ratio: share of the units to remove, in [0, 1).
        round_to: kept channels become a multiple of this where the group is large enough.
    """
    units = group.units
    kept = units - round(units * ratio)
    step = round_to // math.gcd(round_to, channels_per_unit(group))
    kept = min(units, -(-kept // step) * step)
    smallest = int(np.bincount(group.block_of).min())
    gone_per_block = (units - kept + group.blocks - 1) // group.blocks if units != kept else 0
    return max(0, min(gone_per_block, smallest - 1))


def lowest(group: PruneGroup, scores: npt.NDArray[np.float64], per_block: int) -> IntArray:
    """The `per_block` lowest-scored units of each block, ascending; ties go by lowest index."""
    if per_block <= 0:
        return np.zeros(0, dtype=np.int64)
    order = np.lexsort((np.arange(group.units), scores, group.block_of))
    begin = np.searchsorted(group.block_of[order], np.arange(group.blocks))
    chosen = np.concatenate([order[start : start + per_block] for start in begin])
    return np.sort(chosen).astype(np.int64)
