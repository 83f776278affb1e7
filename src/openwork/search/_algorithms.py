"""The built-in search algorithms behind AMCT's interface."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from openwork.errors import ConfigError
from openwork.search._base import SearchChannelBase
from openwork.search._dynamic import solve_dynamic
from openwork.search._greedy import Progress, solve_greedy
from openwork.search._problem import SearchGroup, SearchProblem, Solution
from openwork.search._records import GraphInfo, masks_of, problem_of_records

__all__ = ["DynamicProgrammingSearch", "GreedySearch"]

CURVES = {0: (2.0, 2.0), 1: (2.0, 1.0), 2: (1.0, 1.0)}
"""(power, evenness) of both algorithms by the order of the scores; see `openwork.search._problem`.

A slope of the loss says little about the loss: a trained net stands near a minimum, where the slopes of single samples
cancel and what is lost goes with their squares. The exponents were chosen by accuracy after fine-tuning on images that
no published figure uses; benchmarks/README.md says how.
"""


class _Search(SearchChannelBase):
    """Solves the full problem where there is one, else the one that AMCT's structures describe.

    Args:
        evenness: how much more a channel counts in a layer that has little left: scores are multiplied by
            ``(channels / channels left) ** evenness``. None: by the order of the scores, see `CURVES`.
        power: the products are raised to it and then summed. None: likewise. ``evenness=0, power=1`` sums scores
            as they are.

    Attributes:
        progress: called with the current ratio now and then.
        solved: the problem that `solution` belongs to.
    """

    def __init__(self, evenness: float | None = None, power: float | None = None) -> None:
        for name, value in (("evenness", evenness), ("power", power)):
            if value is not None and not (math.isfinite(value) and value >= 0 and (value > 0 or name == "evenness")):
                allowed = "a number >= 0" if name == "evenness" else "a number > 0"
                raise ConfigError(f"{type(self).__name__}: {name} is {value!r}; allowed: {allowed}")
        self.evenness, self.power = evenness, power
        self.progress: Progress | None = None
        self.solved: SearchProblem | None = None

    @abc.abstractmethod
    def solve(self, problem: SearchProblem) -> Solution:
        """Solve a problem."""

    def channel_prune_search(
        self,
        graph_info: GraphInfo,
        search_records: Sequence[Any],
        prune_config: tuple[float, bool, float],
    ) -> dict[str, list[int]]:
        """See `SearchChannelBase.channel_prune_search`."""
        problem = self.problem or problem_of_records(graph_info, search_records, prune_config)
        groups = tuple(self._curved(group) for group in problem.groups)
        self.solved = replace(problem, groups=groups)
        self.solution = self.solve(self.solved)
        removed = [
            (record, group.source, group.removed(self.solution.kept[group.index]))
            for record, group in zip(search_records, groups, strict=True)
        ]
        return masks_of(removed, graph_info)

    def _curved(self, group: SearchGroup) -> SearchGroup:
        power, evenness = CURVES[min(2, max(0, group.score_order))]
        return replace(
            group,
            power=power if self.power is None else self.power,
            evenness=evenness if self.evenness is None else self.evenness,
        )


class GreedySearch(_Search):
    """The step with the least loss per cost saved, again and again; see `openwork.search._greedy`."""

    def solve(self, problem: SearchProblem) -> Solution:
        """See `solve_greedy`."""
        return solve_greedy(problem, self.progress)


class DynamicProgrammingSearch(_Search):
    """Repeated knapsacks on quantised cost, never worse than greedy; see `openwork.search._dynamic`."""

    def solve(self, problem: SearchProblem) -> Solution:
        """See `solve_dynamic`."""
        return solve_dynamic(problem, self.progress)
