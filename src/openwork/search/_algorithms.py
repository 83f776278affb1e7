"""The built-in search algorithms behind AMCT's interface."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from openwork.search._base import SearchChannelBase
from openwork.search._dynamic import solve_dynamic
from openwork.search._greedy import Progress, solve_greedy
from openwork.search._problem import SearchProblem, Solution
from openwork.search._records import GraphInfo, masks_of, problem_of_records

__all__ = ["DynamicProgrammingSearch", "GreedySearch"]

EVENNESS = 1.0
"""Default of both algorithms; see `openwork.search._problem`."""


class _Search(SearchChannelBase):
    """Solves the full problem where there is one, else the one that AMCT's structures describe.

    Args:
        evenness: how much more a channel counts in a layer that has little left: scores are multiplied by
            ``(channels / channels left) ** evenness``. 0 takes scores as they are.

    Attributes:
        progress: called with the current ratio now and then.
        solved: the problem that `solution` belongs to.
    """

    def __init__(self, evenness: float = EVENNESS) -> None:
        self.evenness = evenness
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
        groups = tuple(replace(group, evenness=self.evenness) for group in problem.groups)
        self.solved = replace(problem, groups=groups)
        self.solution = self.solve(self.solved)
        removed = [
            (record, group.source, group.removed(self.solution.kept[group.index]))
            for record, group in zip(search_records, groups, strict=True)
        ]
        return masks_of(removed, graph_info)


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
