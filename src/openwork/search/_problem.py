"""A search as data: groups with scores and permitted widths, a cost model, a target; and its solution.

The loss of a width is the sum over the removed units of (score * (units / units left)^evenness)^power.
Channels of a layer that has little left are worth more than their scores say, because scores are taken one
channel at a time from the full model; and slopes of the loss are squared, as in its second-order expansion.
evenness 0 and power 1 give the plain sum of scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from openwork.errors import ConfigError
from openwork.graph.groups import IntArray, PruneGroup
from openwork.graph.select import channels_per_unit
from openwork.importance import FloatArray
from openwork.search.cost import CostModel

__all__ = ["SearchGroup", "SearchProblem", "Solution", "group_widths", "permitted_widths"]


def permitted_widths(
    units: int,
    per_step: int = 1,
    channels: int = 1,
    align: int = 1,
    max_prune_ratio: float = 1.0,
    most_steps: int | None = None,
) -> tuple[int, ...]:
    """How many units a group may keep, descending; the first is `units` (nothing removed).

    Args:
        units: units of the group.
        per_step: units that go in one step: one from each tied block.
        channels: channels of the layer that one unit holds.
        align: kept channels are a multiple of it, as ``min(ceil to a multiple, all)``, then as few steps more
            as come out even (as the pruner rounds them).
        max_prune_ratio: the largest share of the units that may go.
        most_steps: how many steps can be taken; None: as many as leave one unit in each of `per_step` blocks.
    """
    most = (units - 1) // per_step if most_steps is None else most_steps
    multiple = align // math.gcd(align, channels)
    if multiple == 1:
        steps = set(range(most + 1))
    else:
        aligned = (min(width, units) for width in range(multiple, units + multiple, multiple))
        steps = {0, *(min(most, -(-(units - width) // per_step)) for width in aligned)}
    allowed = math.floor(units * max_prune_ratio + 1e-9)
    return tuple(units - step * per_step for step in sorted(steps) if step * per_step <= allowed)


def group_widths(group: PruneGroup, align: int = 1, max_prune_ratio: float = 1.0) -> tuple[int, ...]:
    """`permitted_widths` of a group of the analysis."""
    per_step = int(group.steps.sum())
    if bool((group.steps == 1).all()):
        return permitted_widths(
            group.units, per_step, channels_per_unit(group), align, max_prune_ratio, group.most_steps
        )
    # Blocks lose different numbers: count in steps, as the pruner does.
    sizes = np.bincount(group.block_of, minlength=group.blocks)
    total = int((sizes // group.steps).min())
    lost = (
        sum(
            float(step) * float(np.mean(np.bincount(member.units, minlength=group.units)[group.block_of == block]))
            for block, step in enumerate(group.steps)
        )
        for member in group.producers
    )
    channels = max(1, min((round(count) for count in lost if count), default=1))
    kept = permitted_widths(total, 1, channels, align, max_prune_ratio, group.most_steps)
    return tuple(group.units - (total - count) * per_step for count in kept)


@dataclass(frozen=True, eq=False)
class SearchGroup:
    """One group whose width is searched.

    Attributes:
        index: its place in the vector of kept units (and in ``analysis.groups``).
        name: the layer that stands for it in tables and files.
        scores: float64 [units], what is lost with each unit; the lowest go first where there are no ranks.
        block_of: int64 [units]; see `openwork.graph.groups.PruneGroup`.
        steps: int64 [blocks], units that go from each block in one step; None: one from each.
        score_order, ranks: see `openwork.search.SensitivityBase`; ranks None: the scores.
        widths: the numbers of units that may stay, descending, first all; see `permitted_widths`.
        evenness, power: see the module.
        source: the group of the analysis, when there is one.

    Raises:
        ConfigError: a score is NaN or infinite.
    """

    index: int
    name: str
    scores: FloatArray
    block_of: IntArray
    widths: tuple[int, ...]
    evenness: float = 0.0
    source: PruneGroup | None = None
    steps: IntArray | None = None
    power: float = 1.0
    score_order: int = 1
    ranks: FloatArray | None = None

    def __post_init__(self) -> None:
        bad = np.flatnonzero(~np.isfinite(self.scores))
        if len(bad):
            raise ConfigError(
                f"layer {self.name!r}: sensitivity of channel {bad[0]} is {self.scores[bad[0]]}; "
                "finite numbers are needed"
            )

    @property
    def units(self) -> int:
        return len(self.scores)

    @cached_property
    def per_step(self) -> IntArray:
        """int64 [blocks], units that go from each block in one step."""
        blocks = int(self.block_of.max(initial=0)) + 1
        return np.ones(blocks, dtype=np.int64) if self.steps is None else self.steps

    @cached_property
    def order(self) -> IntArray:
        """int64 [steps, units per step]: row r holds the units that go in step r, the lowest of each block."""
        return self._rows(self.scores if self.ranks is None else self.ranks)

    def _rows(self, values: FloatArray) -> IntArray:
        # lexsort is stable, so ties go by lowest index.
        ranked = np.lexsort((values, self.block_of))
        sizes = np.bincount(self.block_of, minlength=len(self.per_step))
        rows = int((sizes // self.per_step).min())
        ends = np.cumsum(sizes)
        parts = [
            ranked[end - size : end - size + rows * step].reshape(rows, step)
            for end, size, step in zip(ends.tolist(), sizes.tolist(), self.per_step.tolist(), strict=True)
        ]
        return np.concatenate(parts, axis=1).astype(np.int64)

    @cached_property
    def losses(self) -> FloatArray:
        """float64 [widths]: what is lost at each permitted width, see the module; the first is 0."""
        # How many go follows from the scores alone, in their own order.
        lowest = self.scores[self._rows(self.scores)]
        growth = (len(lowest) / (len(lowest) - np.arange(len(lowest)))) ** self.evenness
        weighted = lowest * growth[:, None]
        # The sign stays: a score below 0, which a user's sensitivity may give, is a gain.
        return self._at_widths(np.sign(weighted) * np.abs(weighted) ** self.power)

    @cached_property
    def sensitivities(self) -> FloatArray:
        """float64 [widths]: the plain sum of the scores of what is removed, for people to read; the first is 0."""
        return self._at_widths(self.scores[self.order])

    def _at_widths(self, values: FloatArray) -> FloatArray:
        """Sums of the rows of `order` that go, at each permitted width."""
        cumulative = np.concatenate(([0.0], np.cumsum(values.sum(axis=1))))
        per_step = self.order.shape[1]
        return np.asarray(cumulative[[(self.units - width) // per_step for width in self.widths]])

    def removed(self, width: int) -> IntArray:
        """The units that go when `width` stay, ascending."""
        rows = (self.units - width) // self.order.shape[1]
        return np.sort(self.order[:rows].ravel())


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """Find widths of least loss whose cost is at most ``full cost / compress_ratio``.

    Attributes:
        groups: what is searched.
        cost: the cost model.
        full: units of every group of the analysis, searched or not.
        compress_ratio: above 1.
        start: kept units where the search starts: `full`, but for groups whose width the user fixed.
    """

    groups: tuple[SearchGroup, ...]
    cost: CostModel
    full: tuple[int, ...]
    compress_ratio: float
    start: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.start:
            object.__setattr__(self, "start", self.full)

    @cached_property
    def full_cost(self) -> float:
        return self.cost.total(self.full)

    @property
    def budget(self) -> float:
        return self.full_cost / self.compress_ratio

    @cached_property
    def least_cost(self) -> float:
        """The cost with every group at its smallest permitted width."""
        kept = list(self.start)
        for group in self.groups:
            kept[group.index] = group.widths[-1]
        return self.cost.total(kept)

    def solution(self, kept: Sequence[int], trace: Sequence[tuple[float, float]] = ()) -> Solution:
        """Everything that follows from the chosen widths."""
        removed = {g.index: g.removed(kept[g.index]) for g in self.groups if kept[g.index] < g.units}
        losses = {g.index: float(g.losses[g.widths.index(kept[g.index])]) for g in self.groups}
        cost = self.cost.total(kept)
        return Solution(
            kept=tuple(int(units) for units in kept),
            removed=removed,
            losses=losses,
            cost=cost,
            full_cost=self.full_cost,
            reached=cost <= self.budget * (1 + 1e-9),
            trace=list(trace),
        )


@dataclass(frozen=True, eq=False)
class Solution:
    """Widths that a search chose.

    Attributes:
        kept: units kept by every group of the analysis.
        removed: group index -> removed units, ascending; groups that lose nothing are absent.
        losses: group index -> loss, as the search weighs it.
        cost: cost of the pruned model.
        full_cost: cost of the original.
        reached: whether the target was reached.
        trace: (cost, plain sum of the scores removed) after each step, when the algorithm goes in steps.
    """

    kept: tuple[int, ...]
    removed: dict[int, IntArray]
    losses: dict[int, float]
    cost: float
    full_cost: float
    reached: bool
    trace: list[tuple[float, float]] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """full cost / cost."""
        return self.full_cost / self.cost if self.cost else math.inf

    @property
    def loss(self) -> float:
        return sum(self.losses.values())
