"""The knapsack is exact where costs add up, and never worse than greedy elsewhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from openwork.search import solve_dynamic, solve_greedy
from openwork.search._algorithms import CURVES
from openwork.search._dynamic import knapsack
from search.synthetic import best_loss, chain, separable


@pytest.mark.parametrize("seed", range(5))
def test_knapsack_against_brute_force(seed):
    random = np.random.default_rng(seed)
    losses = [random.random(5) for _ in range(4)]
    costs = [random.integers(0, 20, size=5).astype(float) for _ in range(4)]
    budget = sum(cost.min() for cost in costs) + 20
    picks = knapsack(losses, costs, budget, levels=20)
    combinations = list(itertools.product(range(5), repeat=4))
    feasible = [c for c in combinations if sum(costs[i][p] for i, p in enumerate(c)) <= budget]
    best = min(sum(losses[i][p] for i, p in enumerate(c)) for c in feasible)
    assert sum(costs[i][p] for i, p in enumerate(picks)) <= budget
    assert sum(losses[i][p] for i, p in enumerate(picks)) == pytest.approx(best)


def test_knapsack_without_a_solution():
    assert knapsack([np.ones(2)], [np.array([3.0, 4.0])], 2.0, 10) is None


@pytest.mark.parametrize("seed", range(12))
def test_exact_where_costs_add_up(seed):
    problem = separable(seed)
    assert solve_dynamic(problem).loss == pytest.approx(best_loss(problem))


@pytest.mark.parametrize("seed", range(12))
def test_products_of_widths(seed):
    problem, _ = chain(seed)
    solution = solve_dynamic(problem)
    assert solution.reached
    assert solution.loss <= solve_greedy(problem).loss + 1e-12
    assert solution.loss <= best_loss(problem) * 1.1 + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_default_curve(seed):
    power, evenness = CURVES[1]
    problem = separable(seed, evenness=evenness, power=power)
    assert solve_dynamic(problem).loss == pytest.approx(best_loss(problem), rel=1e-6)
    problem, _ = chain(seed, evenness=evenness, power=power)
    solution = solve_dynamic(problem)
    assert solution.loss <= solve_greedy(problem).loss * (1 + 1e-12)
    assert solution.loss <= best_loss(problem) * 1.1


@pytest.mark.parametrize("align", [1, 16])
def test_larger_problems(align):
    problem, _ = chain(3, depth=16, units=64, align=align, ratio=2.5)
    solution = solve_dynamic(problem)
    assert solution.ratio >= 2.5 * (1 - 1e-9)
    assert solution.loss <= solve_greedy(problem).loss + 1e-9
