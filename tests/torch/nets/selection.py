"""Which units to remove, for tests that choose themselves."""

from __future__ import annotations

import numpy as np

from openwork.graph.groups import IntArray, PruneGroup

__all__ = ["half_of_each_block", "some_of_each_block"]


def some_of_each_block(group: PruneGroup, count: int, generator: np.random.Generator) -> IntArray:
    """Random units for `count` steps (fewer where the group is smaller), ascending; one stays in each block."""
    count = min(count, group.most_steps)
    chosen = [np.zeros(0, dtype=np.int64)]
    for block, step in enumerate(group.steps):
        units = np.flatnonzero(group.block_of == block)
        chosen.append(generator.choice(units, count * int(step), replace=False))
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def half_of_each_block(group: PruneGroup, generator: np.random.Generator) -> IntArray:
    """Half of each block, rounded down to whole steps; empty when blocks hold a single unit."""
    sizes = np.bincount(group.block_of, minlength=group.blocks)
    return some_of_each_block(group, int((sizes // group.steps).min()) // 2, generator)
