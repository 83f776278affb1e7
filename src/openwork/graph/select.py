"""Which units of a group go: counting, rounding, ranking, blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from openwork.graph.groups import IntArray, PruneGroup

__all__ = ["balanced", "channels_per_unit", "lowest", "needed", "removable", "sparing"]


def channels_per_unit(group: PruneGroup) -> int:
    """Output channels that one unit stands for: the smallest over the layers that produce it."""
    return max(1, min((round(member.multiplicity) for member in group.producers), default=1))


def removable(group: PruneGroup, ratio: float, round_to: int = 1) -> int:
    """How many steps to take: from each block ``steps[block]`` units go at a time.

    ``units - round(units * ratio)`` units stay (halves to even, as Python rounds), rounded up until their
    channels are a multiple of `round_to`, then down to the same number in every block, but never none. Where
    blocks lose different numbers, steps are counted in the same way.

    Args:
        group: the group.
        ratio: share of the units to remove, in [0, 1).
        round_to: kept channels become a multiple of this where the group is large enough.
    """
    if (group.steps == 1).all():
        total, per_step, width = group.units, group.blocks, channels_per_unit(group)
    else:
        sizes = np.bincount(group.block_of, minlength=group.blocks)
        total, per_step = int((sizes // group.steps).min()), 1
        width = _channels_per_step(group)
    kept = total - round(total * ratio)
    multiple = round_to // math.gcd(round_to, width)
    kept = min(total, -(-kept // multiple) * multiple)
    return max(0, min(-(-(total - kept) // per_step), group.most_steps))


def _channels_per_step(group: PruneGroup) -> int:
    widths = []
    for member in group.producers:
        lost = sum(
            float(step) * np.mean(np.bincount(member.units, minlength=group.units)[group.block_of == block])
            for block, step in enumerate(group.steps)
        )
        if lost:
            widths.append(round(lost))
    return max(1, min(widths, default=1))


def lowest(group: PruneGroup, scores: npt.NDArray[np.float64], steps: int) -> IntArray:
    """The lowest-scored units of each block, ``steps * group.steps[block]`` of them, ascending.

    Ties go by lowest index.
    """
    if steps <= 0:
        return np.zeros(0, dtype=np.int64)
    scores = np.array(scores, dtype=np.float64)
    scores[needed(group, scores)] = np.inf
    order = np.lexsort((np.arange(group.units), scores, group.block_of))
    begin = np.searchsorted(group.block_of[order], np.arange(group.blocks))
    chosen = [order[start : start + steps * step] for start, step in zip(begin, group.steps, strict=True)]
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def needed(group: PruneGroup, scores: npt.NDArray[np.float64]) -> IntArray:
    """Units that must stay so that no parameter loses a whole axis: the best of those that make it up.

    A layer may read part of a group only (the pieces of an uneven split).
    """
    keep = []
    for member in group.members:
        if len(member.positions) == member.size:
            units = np.flatnonzero(np.bincount(member.units, minlength=group.units))
            if len(units) < group.units:
                keep.append(units[np.argmax(scores[units])])
    return np.unique(np.array(keep, dtype=np.int64))


def sparing(groups: Sequence[PruneGroup], removed: Mapping[int, IntArray]) -> dict[int, IntArray]:
    """The choice without what would take a whole axis from a parameter.

    `lowest` sees to it within a group; a layer that reads parts of several groups (a piece of a concatenation) can
    still lose all of them together. Then the group that loses least is left alone.

    Args:
        groups: groups of the model, all that are chosen from.
        removed: units that go, by group.
    """
    left = {index: units for index, units in removed.items() if len(units)}
    by_index = {group.index: group for group in groups}
    while True:
        lost: dict[tuple[str, int, int], int] = {}
        sizes: dict[tuple[str, int, int], int] = {}
        touching: dict[tuple[str, int, int], list[int]] = {}
        for index, units in left.items():
            dead = np.zeros(by_index[index].units, dtype=bool)
            dead[units] = True
            for member in by_index[index].members:
                count = int(dead[member.units].sum())
                if count:
                    key = member.parameter, member.axis, member.blocks
                    lost[key] = lost.get(key, 0) + count
                    sizes[key] = member.size
                    touching.setdefault(key, []).append(index)
        emptied = next((key for key, count in lost.items() if count == sizes[key]), None)
        if emptied is None:
            return left
        del left[min(touching[emptied], key=lambda index: (len(left[index]), index))]


def balanced(group: PruneGroup, removed: IntArray) -> bool:
    """Whether these units take a whole number of steps from every block and leave something in each."""
    gone = np.bincount(group.block_of[removed], minlength=group.blocks)
    steps = gone // group.steps
    dead = np.zeros(group.units, dtype=bool)
    dead[removed] = True
    if any(len(m.positions) == m.size and dead[m.units].all() for m in group.members):
        return False
    return bool((gone % group.steps == 0).all() and (steps == steps[0]).all() and steps[0] <= group.most_steps)
