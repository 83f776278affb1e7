"""Search problems made up by a seed: chains of convolutions with residual streams, blocks and caps."""

from __future__ import annotations

import itertools

import numpy as np

from openwork.graph.groups import AxisSize, CostTerm
from openwork.search import SearchGroup, SearchProblem, permitted_widths
from openwork.search.cost import from_terms


def chain(
    seed, depth=4, units=6, align=1, blocks=1, ratio=1.7, cost="macs", max_prune_ratio=1.0, evenness=0.0, power=1.0
):
    """A chain of `depth` layers, input 3 and output 10 fixed; every third layer reads a residual stream."""
    random = np.random.default_rng(seed)
    sizes = [int(units * random.integers(1, 3)) * blocks for _ in range(depth)]
    terms = []
    axes = [AxisSize(3.0), *(AxisSize(0.0, ((index, 1.0),)) for index in range(depth)), AxisSize(10.0)]
    for layer in range(depth + 1):
        inner, outer = axes[layer], axes[layer + 1]
        moving = tuple(axis for axis in (inner, outer) if axis.terms)
        fixed = np.prod([axis.fixed for axis in (inner, outer) if not axis.terms])
        area = float(random.integers(1, 50))
        terms.append(CostTerm("macs", f"conv{layer}", "conv", area * fixed, moving))
        terms.append(CostTerm("params", f"conv{layer}.weight", "", 9.0 * fixed, moving))
        terms.append(CostTerm("activations", f"conv{layer}", "conv", area, (outer,)))
    for layer in range(2, depth, 3):  # both sides of one layer are the same stream
        terms.append(CostTerm("macs", f"side{layer}", "conv", 5.0, (axes[layer], axes[layer])))
    groups = tuple(
        SearchGroup(
            index,
            f"conv{index}",
            random.gamma(1.0, size=size),
            np.repeat(np.arange(blocks), size // blocks),
            permitted_widths(size, blocks, 1, align, max_prune_ratio),
            evenness,
            power=power,
        )
        for index, size in enumerate(sizes)
    )
    return SearchProblem(groups, from_terms(cost, terms), tuple(sizes), ratio), terms


def separable(seed, depth=4, units=6, ratio=1.7, **curve):
    """Layers whose costs simply add up, so that the knapsack is exact."""
    random = np.random.default_rng(seed)
    sizes = [int(units * random.integers(1, 3)) for _ in range(depth)]
    terms = [
        CostTerm("macs", f"l{i}", "mm", float(random.integers(1, 9)), (AxisSize(0.0, ((i, 1.0),)),))
        for i in range(depth)
    ]
    groups = tuple(
        SearchGroup(i, f"l{i}", random.gamma(1.0, size=size), np.zeros(size, int), permitted_widths(size), **curve)
        for i, size in enumerate(sizes)
    )
    return SearchProblem(groups, from_terms("macs", terms), tuple(sizes), ratio)


def cost_of(terms, kept, kind="macs"):
    """The cost, written out."""
    total = 0.0
    for term in terms:
        if term.kind == kind:
            value = term.constant
            for axis in term.axes:
                value *= axis.fixed + sum(c * kept[g] for g, c in axis.terms)
            total += value
    return total


def best_loss(problem):
    """Least loss over all combinations of widths within the budget, by trying every one."""
    best = np.inf
    for combination in itertools.product(*(range(len(group.widths)) for group in problem.groups)):
        kept = list(problem.full)
        loss = 0.0
        for group, place in zip(problem.groups, combination):
            kept[group.index] = group.widths[place]
            loss += group.losses[place]
        if loss < best and problem.cost.total(kept) <= problem.budget * (1 + 1e-9):
            best = loss
    return best
