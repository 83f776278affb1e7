"""Dynamic programming: the multiple-choice knapsack on quantised cost.

min sum_g loss_g(width_g)  subject to  sum_g cost_g(width_g) <= budget. The cost of a model is not such a
sum (a convolution costs input width times output width), so it is replaced by the change of each group alone
around the current point, the knapsack is solved exactly inside a trust region, and the step is kept if the
true cost and loss agree that it is better; otherwise the region shrinks. Where costs do add up, one round is
exact.
"""

from __future__ import annotations

import numpy as np

from openwork.search._greedy import Progress, Walk, descend
from openwork.search._problem import SearchProblem, Solution

__all__ = ["knapsack", "solve_dynamic"]

_LEVELS = 2000
_CHOICES = 65


def knapsack(losses: list[np.ndarray], costs: list[np.ndarray], budget: float, levels: int) -> list[int] | None:
    """One choice of each row, of least total loss, with total cost at most `budget`.

    Args:
        losses: for each row, the loss of each choice.
        costs: for each row, the cost of each choice, of any sign; they are shifted to start at 0.
        budget: in the same unit.
        levels: quanta that the budget is cut into; costs are rounded up, so the answer is always feasible.

    Returns:
        the choice of each row, or None when not even the cheapest choices fit.
    """
    least = [float(cost.min()) for cost in costs]
    room = budget - sum(least)
    if room < 0:
        return None
    quantum = room / levels if room > 0 else 1.0
    best = np.zeros(levels + 1)  # least loss at a cost of at most so many quanta
    picks = []
    for loss, cost, low in zip(losses, costs, least, strict=True):
        # A hair of tolerance keeps exact multiples of the quantum from being rounded up.
        quanta = np.ceil((cost - low) / quantum - 1e-9).astype(np.int64)
        table = np.full((len(loss), levels + 1), np.inf)
        for choice, used in enumerate(quanta):
            if used <= levels:
                table[choice, used:] = best[: levels + 1 - used] + loss[choice]
        pick = table.argmin(axis=0)
        best = table[pick, np.arange(levels + 1)]
        picks.append((pick, quanta))
    level = levels
    chosen: list[int] = []
    for pick, quanta in reversed(picks):
        choice = int(pick[level])
        chosen.append(choice)
        level -= int(quanta[choice])
    return chosen[::-1]


def solve_dynamic(problem: SearchProblem, progress: Progress | None = None, rounds: int = 12) -> Solution:
    """Solve a problem by repeated knapsacks, starting from the greedy answer; never worse than it.

    Args:
        problem: the problem.
        progress: called with the current ratio after each round.
        rounds: at most so many knapsacks.
    """
    walk = Walk.at_start(problem)
    descend(walk, progress)
    walk.give_back()
    walk.exchange()
    if walk.slack < 0 or not problem.groups:
        return walk.solution()
    best, best_loss = list(walk.places), walk.loss
    radius = 1.0
    for _ in range(rounds):
        options = [_options(walk, number, radius) for number in range(len(problem.groups))]
        losses = [group.losses[option] for group, option in zip(problem.groups, options, strict=True)]
        costs = [
            np.array([-walk.gain(number, int(place)) for place in option]) for number, option in enumerate(options)
        ]
        picks = knapsack(losses, costs, walk.slack, _LEVELS)
        if picks is not None:
            for number, pick in enumerate(picks):
                walk.move(number, int(options[number][pick]))
        if walk.slack < 0:
            descend(walk)
        walk.give_back()
        walk.exchange()
        if walk.slack >= 0 and walk.loss < best_loss - 1e-12 * abs(best_loss):
            best, best_loss = list(walk.places), walk.loss
        else:
            radius /= 2
            for number, place in enumerate(best):
                walk.move(number, place)
            walk.loss = best_loss
        if progress is not None:
            progress(problem.full_cost / walk.state.total)
        if radius < 1e-3:
            break
    return problem.solution(walk.state.kept)


def _options(walk: Walk, number: int, radius: float) -> np.ndarray:
    """Places of a group's widths to choose from: near ones all, far ones thinned out, always the present."""
    count = len(walk.problem.groups[number].widths)
    here = walk.places[number]
    reach = max(1, round(radius * count))
    low, high = max(0, here - reach), min(count - 1, here + reach)
    thinned = np.linspace(low, high, min(_CHOICES, high - low + 1)).round().astype(np.int64)
    near = np.arange(max(low, here - 4), min(high, here + 4) + 1)
    return np.unique(np.concatenate((thinned, near, [here])))
