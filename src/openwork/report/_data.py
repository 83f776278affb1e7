"""The figures of a search report, worked out once from problem and solution for all ways of showing them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from openwork.search._greedy import Walk, descend
from openwork.search._problem import SearchProblem, Solution

__all__ = ["LayerRow", "SearchReport", "budget_curve", "format_quantity"]


def format_quantity(value: float) -> str:
    """A figure with three digits and a power of thousand: 1.23 G, 45.6 k, 789 u (micro)."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    power = max(-3, min(5, math.floor(math.log10(abs(value)) / 3 + 1e-12)))
    scaled = value / 1000**power
    prefix = {-3: "n", -2: "u", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P"}[power]
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    text = f"{scaled:.{0 if power == 0 and scaled == int(scaled) else digits}f}"
    return f"{text} {prefix}".rstrip()


def budget_curve(problem: SearchProblem, beyond: float = 1.6, points: int = 120) -> list[tuple[float, float]]:
    """Sensitivity removed against compression, as greedy search walks on past the target.

    Args:
        problem: the problem.
        beyond: how far past the target, as a factor of the ratio.
        points: at most about so many points are kept.

    Returns:
        (compression ratio, plain sum of the scores removed), ascending, from (1, 0) on.
    """
    walk = Walk.at_start(replace(problem, compress_ratio=problem.compress_ratio * beyond))
    full = problem.full_cost
    start = walk.state.total
    descend(walk, most_steps=4 * points)
    curve = [(full / start, 0.0), *((full / cost, removed) for cost, removed in walk.trace)]
    stride = max(1, len(curve) // points)
    return [*curve[:-1:stride], curve[-1]]


@dataclass(frozen=True)
class LayerRow:
    """One searched group.

    Attributes:
        name: the layer that stands for it.
        tied: the other layers that lose the same channels.
        before, after: channels of that layer in the group.
        loss: sensitivity removed: the plain sum of the scores.
        saved: cost saved in the layers that the group touches, all other widths as chosen.
        curve: (channels kept, sensitivity removed) at every permitted width, descending.
    """

    name: str
    tied: tuple[str, ...]
    before: int
    after: int
    loss: float
    saved: float
    curve: tuple[tuple[int, float], ...]

    @property
    def share(self) -> float:
        """Share of the channels that go."""
        return 1 - self.after / self.before


@dataclass(frozen=True, eq=False)
class SearchReport:
    """A finished search.

    Attributes:
        model: name of the model's class.
        problem: what was searched, as the algorithm saw it.
        solution: what was found.
        sensitivity: name of the sensitivity.
        algorithm: name of the algorithm.
        tied: group index -> layers that lose the same channels, the shown one left out.
        channels: group index -> channels of the shown layer per unit.
        seconds: phase -> time it took.
        frozen: (layer or reason, why) of what could not be searched.
        warnings: shown on top.
    """

    model: str
    problem: SearchProblem
    solution: Solution
    sensitivity: str = ""
    algorithm: str = ""
    tied: Mapping[int, Sequence[str]] = field(default_factory=dict)
    channels: Mapping[int, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    frozen: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()

    @cached_property
    def rows(self) -> list[LayerRow]:
        """One for each searched group, in the order of the analysis."""
        state = self.problem.cost.state(self.solution.kept)
        rows = []
        for group in self.problem.groups:
            each = self.channels.get(group.index, 1)
            kept = self.solution.kept[group.index]
            curve = dict(zip(group.widths, group.sensitivities.tolist(), strict=True))
            rows.append(
                LayerRow(
                    name=group.name,
                    tied=tuple(self.tied.get(group.index, ())),
                    before=group.units * each,
                    after=kept * each,
                    loss=curve[kept],
                    saved=max(0.0, -state.gain(group.index, group.units)),
                    curve=tuple((width * each, loss) for width, loss in curve.items()),
                )
            )
        return rows

    @cached_property
    def layer_costs(self) -> list[tuple[str, float, float]]:
        """(layer, cost before, cost after), in the order of the run."""
        before = self.problem.cost.by_layer(self.problem.full)
        after = self.problem.cost.by_layer(self.solution.kept)
        return [(name, cost, after[name]) for name, cost in before.items()]

    @cached_property
    def curve(self) -> list[tuple[float, float]]:
        """See `budget_curve`."""
        return budget_curve(self.problem)

    @property
    def loss(self) -> float:
        """Sensitivity removed, all groups."""
        return sum(row.loss for row in self.rows)

    @property
    def total_loss(self) -> float:
        """Sum of the scores of all channels that could be searched; what shares are shares of."""
        return sum(float(group.scores.sum()) for group in self.problem.groups) or 1.0
