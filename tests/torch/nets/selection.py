"""Which units to remove, for tests that choose themselves."""

from __future__ import annotations

import numpy as np

from openwork.graph.groups import IntArray, PruneGroup

__all__ = ["half_of_each_block", "some_of_each_block"]


def some_of_each_block(group: PruneGroup, count: int, generator: np.random.Generator) -> IntArray:
    """`count` random units of every block, ascending; at least one stays in each."""
    chosen = []
    for block in range(group.blocks):
        units = np.flatnonzero(group.block_of == block)
        chosen.append(generator.choice(units, min(count, len(units) - 1), replace=False))
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def half_of_each_block(group: PruneGroup, generator: np.random.Generator) -> IntArray:
    """Half of each block, rounded down; empty when blocks hold a single unit."""
    return some_of_each_block(group, group.units // group.blocks // 2, generator)
