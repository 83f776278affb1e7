"""Greedy search: take the step with the least loss per cost saved, until the target is met.

Steps stand in a priority queue. Removing channels elsewhere only lowers what a step saves, so an old entry is
never too pessimistic: an entry is recomputed when it comes to the top, and taken if it is still the best
(lazy evaluation, Minoux 1978). Afterwards no step is left that could be undone within the budget, and single
exchanges (one more step here, others undone there) are tried while they lower the loss.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from openwork.search._problem import SearchProblem, Solution
from openwork.search.cost import CostState

__all__ = ["Walk", "solve_greedy"]

Progress = Callable[[float], None]

# Above so many steps to choose from, several neighbouring steps are taken at once until the budget is met;
# afterwards single steps are given back.
_MOST_STEPS = 4000


@dataclass
class Walk:
    """A point of the search: the cost state and where each group stands in its list of widths."""

    problem: SearchProblem
    state: CostState
    places: list[int]
    trace: list[tuple[float, float]] = field(default_factory=list)
    loss: float = 0.0
    sensitivity: float = 0.0
    losses: list[list[float]] = field(init=False)
    sensitivities: list[list[float]] = field(init=False)
    widths: list[npt.NDArray[np.int64]] = field(init=False)

    def __post_init__(self) -> None:
        self.losses = [group.losses.tolist() for group in self.problem.groups]
        self.sensitivities = [group.sensitivities.tolist() for group in self.problem.groups]
        self.widths = [np.array(group.widths, dtype=np.int64) for group in self.problem.groups]

    @classmethod
    def at_start(cls, problem: SearchProblem) -> Walk:
        """All groups at their full width."""
        return cls(problem, problem.cost.state(problem.start), [0] * len(problem.groups))

    @property
    def slack(self) -> float:
        """Budget that is left; negative while over it. Rounding may not decide, hence the tolerance."""
        return self.problem.budget * (1 + 1e-9) - self.state.total

    def gain(self, number: int, place: int) -> float:
        """Cost saved by moving group `number` (of the problem) to `place` in its widths."""
        group = self.problem.groups[number]
        return self.state.gain(group.index, group.widths[place])

    def loss_of(self, number: int, place: int) -> float:
        """Loss added by that move."""
        losses = self.losses[number]
        return losses[place] - losses[self.places[number]]

    def move(self, number: int, place: int) -> None:
        """Make the move."""
        group = self.problem.groups[number]
        self.loss += self.loss_of(number, place)
        scores = self.sensitivities[number]
        self.sensitivity += scores[place] - scores[self.places[number]]
        self.state.apply(group.index, group.widths[place])
        self.places[number] = place
        self.trace.append((self.state.total, self.sensitivity))

    def give_back(self) -> None:
        """Undo steps, the most valuable first, until not one more can be undone within the budget."""
        while True:
            best: tuple[float, int] | None = None
            for number, place in enumerate(self.places):
                if place and -self.gain(number, place - 1) <= self.slack:
                    value = -self.loss_of(number, place - 1)
                    if best is None or value > best[0]:
                        best = (value, number)
            if best is None:
                return
            self.move(best[1], self.places[best[1]] - 1)

    def exchange(self, passes: int = 2) -> None:
        """Try single exchanges; keep what lowers the loss.

        One more step of a group is paid back by undoing others; one step undone is made up for by others, those
        with the least loss per cost saved.
        """
        for _ in range(passes):
            improved = False
            for number, group in enumerate(self.problem.groups):
                for change in (1, -1):
                    target = self.places[number] + change
                    if 0 <= target < len(group.widths):
                        improved |= self._try(number, target)
            if not improved:
                return

    def _try(self, number: int, target: int) -> bool:
        """Move there and settle on the budget; back again if that is no better."""
        places, before, trace = list(self.places), (self.loss, self.sensitivity), len(self.trace)
        self.move(number, target)
        while self.slack < 0 and self._cheapest_step(but=number):
            pass
        self.give_back()
        if self.slack >= 0 and self.loss < before[0] - 1e-12 * abs(before[0]):
            return True
        for other, place in enumerate(places):
            if self.places[other] != place:
                self.move(other, place)
        self.loss, self.sensitivity = before
        del self.trace[trace:]
        return False

    def _cheapest_step(self, but: int) -> bool:
        """Take the step with the least loss per cost saved, of any group `but` one; False: there is none."""
        best: tuple[float, int] | None = None
        for number, group in enumerate(self.problem.groups):
            place = self.places[number] + 1
            if number == but or place >= len(group.widths):
                continue
            gain = self.gain(number, place)
            if gain > 0 and (best is None or self.loss_of(number, place) / gain < best[0]):
                best = (self.loss_of(number, place) / gain, number)
        if best is not None:
            self.move(best[1], self.places[best[1]] + 1)
        return best is not None

    def solution(self) -> Solution:
        """What has been reached."""
        return self.problem.solution(self.state.kept, self.trace)


def solve_greedy(problem: SearchProblem, progress: Progress | None = None) -> Solution:
    """Solve a problem greedily; the achieved ratio is within one step of the target.

    Args:
        problem: the problem.
        progress: called with the current ratio now and then.

    Returns:
        the solution; when even the smallest widths cost too much, these, and ``reached`` is False.
    """
    walk = Walk.at_start(problem)
    descend(walk, progress)
    walk.give_back()
    walk.exchange()
    return walk.solution()


def descend(walk: Walk, progress: Progress | None = None, most_steps: int = _MOST_STEPS) -> None:
    """Take steps until the budget is met or nothing is left that saves anything.

    Args:
        walk: moved in place.
        progress: called with the current ratio now and then.
        most_steps: with more steps than that to choose from, several of a group are taken at once.
    """
    problem = walk.problem
    stride = max(1, sum(len(group.widths) for group in problem.groups) // most_steps)
    best = _best_jump if problem.cost.staircase else _next_step
    queue: list[tuple[float, int, int]] = []

    def push(number: int) -> None:
        step = best(walk, number, stride)
        if step is not None:
            heapq.heappush(queue, (step[0], number, step[1]))

    for number in range(len(problem.groups)):
        push(number)
    count = 0
    while walk.slack < 0 and queue:
        _, number, _ = heapq.heappop(queue)
        step = best(walk, number, stride)
        if step is None:
            continue
        if queue and step[0] > queue[0][0]:
            heapq.heappush(queue, (step[0], number, step[1]))
            continue
        walk.move(number, step[1])
        push(number)
        count += 1
        if progress is not None and count % 64 == 0:
            progress(problem.full_cost / walk.state.total)
    if walk.slack < 0:  # what saves nothing by itself may still save something together
        for number, group in enumerate(problem.groups):
            if walk.places[number] + 1 < len(group.widths) and walk.gain(number, len(group.widths) - 1) > 0:
                walk.move(number, len(group.widths) - 1)
    if progress is not None:
        progress(problem.full_cost / walk.state.total)


def _next_step(walk: Walk, number: int, stride: int) -> tuple[float, int] | None:
    """(loss per cost saved, place) of the next width that saves something; None at the end."""
    place = min(walk.places[number] + stride, len(walk.problem.groups[number].widths) - 1)
    if place == walk.places[number]:
        return None
    gain = walk.gain(number, place)
    return (walk.loss_of(number, place) / gain, place) if gain > 0 else None


def _best_jump(walk: Walk, number: int, stride: int) -> tuple[float, int] | None:
    """As `_next_step`, over all smaller widths: on a staircase the best jump ends just below an edge."""
    place = walk.places[number]
    group = walk.problem.groups[number]
    gains = walk.state.gains(group.index, walk.widths[number][place + 1 :])
    if not (gains > 0).any():
        return None
    losses = group.losses[place + 1 :] - group.losses[place]
    density = np.where(gains > 0, losses / np.where(gains > 0, gains, 1.0), np.inf)
    best = int(density.argmin())
    return float(density[best]), place + 1 + best
