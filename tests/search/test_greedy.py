"""The target is hit within one step, caps and alignment hold, and greedy is near the optimum."""

from __future__ import annotations

import numpy as np
import pytest

from openwork.search import SearchProblem, solve_greedy
from openwork.search._algorithms import CURVES
from search.synthetic import best_loss, chain, cost_of, separable


def check(problem, terms, solution, kind="macs"):
    """What every solution has to satisfy, from the widths alone."""
    assert solution.cost == pytest.approx(cost_of(terms, solution.kept, kind))
    for group in problem.groups:
        kept = solution.kept[group.index]
        assert kept in group.widths
        removed = solution.removed.get(group.index, np.array([], int))
        assert len(removed) == group.units - kept
        per_block = np.bincount(group.block_of[removed], minlength=group.block_of.max() + 1)
        assert len(set(per_block.tolist())) == 1


@pytest.mark.parametrize("ratio", [1.2, 1.5, 2.0, 3.0])
@pytest.mark.parametrize(("align", "blocks"), [(1, 1), (16, 1), (1, 4), (16, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_hits_the_target_within_one_step(seed, align, blocks, ratio):
    problem, terms = chain(seed, depth=8, units=32, align=align, blocks=blocks, ratio=ratio)
    solution = solve_greedy(problem)
    check(problem, terms, solution)
    assert solution.reached
    assert solution.ratio >= ratio * (1 - 1e-9)
    for group in problem.groups:  # undoing any one step misses the target
        place = group.widths.index(solution.kept[group.index])
        if place:
            kept = list(solution.kept)
            kept[group.index] = group.widths[place - 1]
            assert cost_of(terms, problem.full) / cost_of(terms, kept) < ratio


@pytest.mark.parametrize("cost", ["macs", "params"])
def test_other_costs(cost):
    problem, terms = chain(5, depth=8, units=32, cost=cost)
    check(problem, terms, solve_greedy(problem), cost)


def test_unreachable_target_gives_the_exact_best():
    problem, terms = chain(1, depth=5, units=16, ratio=50, max_prune_ratio=0.5)
    solution = solve_greedy(problem)
    check(problem, terms, solution)
    assert not solution.reached
    assert solution.kept == tuple(group.widths[-1] for group in problem.groups)
    assert solution.cost == pytest.approx(problem.least_cost)


def test_nothing_to_search():
    problem, _ = chain(1)
    empty = SearchProblem((), problem.cost, problem.full, 2.0)
    solution = solve_greedy(empty)
    assert (solution.removed, solution.reached, solution.ratio) == ({}, False, 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_near_the_optimum(seed):
    problem = separable(seed) if seed % 2 else chain(seed)[0]
    assert solve_greedy(problem).loss <= best_loss(problem) * 1.15 + 1e-9


def test_near_the_optimum_of_the_default_curve():
    """Steps of a twelfth of a layer leave greedy search room to err; on average it does not."""
    power, evenness = CURVES[1]
    ratios = []
    for seed in range(14):
        make = separable if seed % 2 else lambda *args, **curve: chain(*args, **curve)[0]
        problem = make(seed, evenness=evenness, power=power)
        ratios.append(solve_greedy(problem).loss / best_loss(problem))
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.25
    assert np.mean(ratios) <= 1.02


def test_trace_holds_the_plain_sums_of_scores():
    problem, terms = chain(4, depth=5, units=8, ratio=2.0, evenness=2.0, power=2.0)
    solution = solve_greedy(problem)
    cost, removed = solution.trace[-1]
    assert cost == pytest.approx(cost_of(terms, solution.kept))
    assert removed == pytest.approx(sum(problem.groups[i].scores[gone].sum() for i, gone in solution.removed.items()))


def test_zero_scores_go_first():
    problem, _ = chain(2, depth=3, units=8, ratio=1.05)
    scores = np.array(problem.groups[1].scores)
    scores[3] = 0.0
    object.__setattr__(problem.groups[1], "scores", scores)
    assert 3 in solve_greedy(problem).removed[1]


def test_progress_ends_at_the_ratio_reached():
    problem, _ = chain(2, depth=8, units=64, ratio=2.0)
    seen = []
    solve_greedy(problem, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] >= 2.0 * (1 - 1e-9)
