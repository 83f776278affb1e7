"""Costs and their increments against the terms written out; the latency table against its measurements."""

from __future__ import annotations

import numpy as np
import pytest

from openwork.errors import ConfigError
from openwork.graph.groups import AxisSize
from openwork.search.cost import BitOps, LatencyCost, LayerTable, from_terms, names
from openwork.search.cost._latency import grid, interpolator
from search.synthetic import chain, cost_of


@pytest.mark.parametrize(
    ("name", "kind", "factor"),
    [
        ("macs", "macs", 1),
        ("bitops", "macs", 1024),
        ("params", "params", 1),
        ("activation_memory", "activations", 4),
    ],
)
def test_total_and_increments(name, kind, factor):
    problem, terms = chain(0, depth=6)
    model = from_terms(name, terms)
    random = np.random.default_rng(1)
    state = model.state(problem.full)
    for _ in range(50):
        group = int(random.integers(6))
        units = int(random.integers(1, problem.full[group] + 1))
        kept = list(state.kept)
        kept[group] = units
        expected = factor * cost_of(terms, kept, kind)
        assert state.total - state.gain(group, units) == pytest.approx(expected)
        state.apply(group, units)
        assert state.total == pytest.approx(expected)
    assert sum(model.by_layer(state.kept).values()) == pytest.approx(state.total)


def test_bits_of_single_layers():
    problem, terms = chain(0)
    plain, mixed = BitOps(terms), BitOps(terms, {"conv1": (8, 8)})
    costs, fewer = plain.by_layer(problem.full), mixed.by_layer(problem.full)
    assert fewer == {name: cost / 16 if name == "conv1" else cost for name, cost in costs.items()}


def test_layers_of_params_are_modules():
    problem, terms = chain(0)
    assert list(from_terms("params", terms).by_layer(problem.full))[:2] == ["conv0", "conv1"]


def test_unknown_cost():
    assert names() == ["activation_memory", "bitops", "latency", "macs", "params"]
    with pytest.raises(ConfigError, match="cost 'mac' is unknown; did you mean 'macs'"):
        from_terms("mac", [])


@pytest.mark.parametrize("width", [1, 3, 16, 17, 40, 64, 100, 512])
def test_grid_covers_both_sides_of_the_edges(width):
    points = grid(width)
    assert points == sorted(set(points))
    assert points[0] == 1
    assert points[-1] == width
    if width >= 40:
        assert {16, 17} <= set(points) or any(point % 16 == 1 for point in points[1:])


def staircase(inner, outer, block=16):
    """The true time of an imagined runtime: whole blocks are computed."""
    return float(-(-inner // block) * -(-outer // block))


def test_table_of_a_staircase_is_reproduced_everywhere():
    inputs, outputs = grid(64), grid(96, most=6)
    times = np.array([[staircase(i, o) for o in outputs] for i in inputs])
    lookup = interpolator(inputs, outputs, times)
    for i in range(1, 65):
        for o in range(1, 97):
            assert lookup(i, o) == pytest.approx(staircase(i, o)), (i, o)


def test_table_of_a_wide_layer_keeps_the_steps():
    points = grid(512)
    times = np.array([[staircase(1, o) for o in points]])
    lookup = interpolator([1], points, times)
    errors = [abs(lookup(1, o) - staircase(1, o)) for o in range(1, 513)]
    assert max(errors) <= 1e-9  # the true stairs rise evenly, so few points suffice


def test_noise_does_not_make_wider_layers_faster():
    points = grid(64)
    random = np.random.default_rng(0)
    times = np.array([[i * o * random.uniform(0.8, 1.2) for o in points] for i in points])
    lookup = interpolator(points, points, times)
    table = np.array([[lookup(i, o) for o in range(1, 65)] for i in range(1, 65)])
    assert (np.diff(table, axis=0) >= 0).all()
    assert (np.diff(table, axis=1) >= 0).all()


def test_latency_state():
    layers = [
        LayerTable("a", AxisSize(3.0), AxisSize(0.0, ((0, 1.0),)), staircase),
        LayerTable("b", AxisSize(0.0, ((0, 1.0),)), AxisSize(0.0, ((1, 2.0),)), staircase),
    ]
    model = LatencyCost(layers, fixed=5.0)
    state = model.state([32, 20])
    assert state.total == 5 + 2 + 2 * 3
    assert state.gains(0, np.array([32, 17, 16, 1])).tolist() == [0, 0, 4, 4]
    assert state.gain(0, 17) == 0
    assert state.gain(0, 16) == 1 + 3
    state.apply(0, 16)
    assert state.total == 5 + 1 + 3
    assert model.by_layer(state.kept) == {"a": 1.0, "b": 3.0}


def test_search_on_a_staircase_stops_at_the_edges():
    from openwork.search import SearchGroup, SearchProblem, permitted_widths, solve_greedy

    layers = [LayerTable(str(i), AxisSize(3.0), AxisSize(0.0, ((i, 1.0),)), staircase) for i in range(3)]
    scores = np.random.default_rng(0).gamma(1.0, size=(3, 64))
    groups = tuple(SearchGroup(i, str(i), scores[i], np.zeros(64, int), permitted_widths(64)) for i in range(3))
    solution = solve_greedy(SearchProblem(groups, LatencyCost(layers), (64, 64, 64), 1.5))
    assert solution.cost == 8
    assert all(width % 16 == 0 for width in solution.kept)


def test_many_widths_at_once_agree_with_one_by_one():
    points = grid(48)
    times = np.random.default_rng(0).random((len(points), len(points)))
    lookup = interpolator(points, points, times)
    layers = [
        LayerTable("a", AxisSize(3.0, ((1, 0.5),)), AxisSize(0.0, ((0, 1.0), (1, 1.0))), lookup),
        LayerTable("b", AxisSize(0.0, ((0, 1.0),)), AxisSize(9.0), lookup),
    ]
    state = LatencyCost(layers).state([30, 18])
    units = np.arange(1, 31)
    assert state.gains(0, units) == pytest.approx([state.gain(0, int(count)) for count in units])
    assert state.gains(1, units) == pytest.approx([state.gain(1, int(count)) for count in units])


def test_widths_of_a_grouped_layer_need_not_meet_the_edges():
    both = interpolator([16, 32], [16, 32], np.ones((2, 2)))
    assert both(20, 32) == 1
    points = [24, 72, 96]
    lookup = interpolator(points, points, np.add.outer(points, points))
    assert lookup(24, 96) == 120
    assert 48 <= lookup(48, 24) <= 96
    values = [lookup(width, width) for width in range(97)]
    assert values == sorted(values)
