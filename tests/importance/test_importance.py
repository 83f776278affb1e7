"""Criteria against sums written out position by position."""

from __future__ import annotations

import numpy as np
import pytest

from openwork import importance
from openwork.errors import ConfigError, WeightsError
from openwork.graph.groups import Member, PruneGroup, Role
from openwork.importance._base import channel_sums


def member(parameter, axis, role, size, units=None, positions=None, blocks=1):
    positions = np.arange(size) if positions is None else np.asarray(positions)
    units = np.arange(len(positions)) if units is None else np.asarray(units)
    return Member(parameter, axis, role, size, positions.astype(np.int64), units.astype(np.int64), blocks)


@pytest.fixture
def example():
    """Six channels: two producers (one reads through a residual sum), batch norm, a grouped consumer."""
    random = np.random.default_rng(0)
    weights = {
        "a.weight": random.normal(size=(6, 3, 3, 3)),
        "b.weight": 10 * random.normal(size=(6, 5)),
        "bn.weight": random.normal(size=6),
        "bn.running_mean": random.normal(size=6),
        "c.weight": random.normal(size=(4, 3, 3, 3)),  # groups=2: 6 inputs, 3 at a time
    }
    gradients = {
        name: None if "running" in name else random.normal(size=array.shape) for name, array in weights.items()
    }
    group = PruneGroup(
        0,
        6,
        (
            member("a.weight", 0, Role.PRODUCES, 6),
            member("b.weight", 0, Role.PRODUCES, 6),
            member("bn.weight", 0, Role.CARRIES, 6),
            member("bn.running_mean", 0, Role.CARRIES, 6),
            member("c.weight", 1, Role.CONSUMES, 6, blocks=2),
        ),
        np.array([0, 0, 0, 1, 1, 1]),
        np.array([1, 1]),
    )
    return group, weights, gradients


def slices(weights, unit):
    """The weights that unit takes with it, by parameter, written out."""
    block, inner = divmod(unit, 3)
    return {
        "a.weight": weights["a.weight"][unit],
        "b.weight": weights["b.weight"][unit],
        "bn.weight": weights["bn.weight"][unit],
        "c.weight": weights["c.weight"][2 * block : 2 * block + 2, inner],
    }


def test_balanced_l2_is_the_mean_of_normalised_norms(example):
    group, weights, _ = example
    expected = np.zeros(6)
    for name in ("a.weight", "b.weight"):
        norms = np.array([np.linalg.norm(row) / row.size for row in weights[name]])
        expected += (norms - norms.min()) / (norms.max() - norms.min()) / 2
    assert np.allclose(importance.get("balanced_l2").score(group, weights.get), expected)


def test_balanced_l2_averages_the_channels_of_a_unit():
    weight = np.arange(1.0, 7.0).reshape(6, 1)  # norms 1..6, balanced 0, .2, .4, .6, .8, 1
    group = PruneGroup(
        0, 3, (member("q", 0, Role.PRODUCES, 6, units=[0, 0, 1, 1, 2, 2]),), np.zeros(3, int), np.ones(1, int)
    )
    assert np.allclose(importance.get("balanced_l2").score(group, lambda _: weight), [0.1, 0.5, 0.9])


def test_balanced_l2_normalises_over_the_whole_layer():
    weight = np.array([[1.0], [2.0], [3.0], [5.0]])
    part = member("w", 0, Role.PRODUCES, 4, positions=[1, 2], units=[0, 1])
    group = PruneGroup(0, 2, (part,), np.zeros(2, int), np.ones(1, int))
    assert np.allclose(importance.get("balanced_l2").score(group, lambda _: weight), [0.25, 0.5])


def test_balanced_l2_of_equal_channels_is_zero():
    group = PruneGroup(0, 4, (member("w", 0, Role.PRODUCES, 4),), np.zeros(4, int), np.ones(1, int))
    assert not importance.get("balanced_l2").score(group, lambda _: np.ones((4, 2))).any()


def test_transposed_convolution_with_groups():
    weight = np.random.default_rng(1).normal(size=(4, 3, 2, 2))  # in 4, out 6 in two groups
    group = PruneGroup(0, 6, (member("t", 1, Role.PRODUCES, 6, blocks=2),), np.repeat([0, 1], 3), np.ones(2, int))
    norms = np.array([np.linalg.norm(weight[2 * (c // 3) : 2 * (c // 3) + 2, c % 3]) for c in range(6)])
    expected = (norms - norms.min()) / np.ptp(norms)
    assert np.allclose(importance.get("balanced_l2").score(group, lambda _: weight), expected)


@pytest.mark.parametrize("name", ["balanced_l2", "l1", "l2"])
@pytest.mark.parametrize("precision", [np.float32, np.float16])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_norms_of_low_precision_weights_are_exact(example, name, precision, scale):
    """As if the same weights had been given in float64: squares neither overflow nor round to their precision."""
    group, weights, _ = example
    low = {key: (scale * array).astype(precision) for key, array in weights.items()}
    high = {key: array.astype(np.float64) for key, array in low.items()}
    criterion = importance.get(name)
    assert np.allclose(criterion.score(group, low.get), criterion.score(group, high.get), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "order"), [("l1", 1), ("l2", 2)])
def test_magnitude(example, name, order):
    group, weights, _ = example
    norms = {
        parameter: np.array([np.linalg.norm(slices(weights, u)[parameter].ravel(), order) for u in range(6)])
        for parameter in ("a.weight", "b.weight", "c.weight")
    }
    expected = np.mean([values / values.mean() for values in norms.values()], axis=0)
    assert np.allclose(importance.get(name).score(group, weights.get), expected)


@pytest.mark.parametrize(("name", "reduce"), [("taylor", np.abs), ("fisher", np.square)])
def test_gradient_criteria(example, name, reduce):
    group, weights, gradients = example
    products = {key: weights[key] * gradients[key] for key in weights if gradients[key] is not None}
    expected = [sum(reduce(part.sum()) for part in slices(products, unit).values()) for unit in range(6)]
    assert np.allclose(importance.get(name).score(group, weights.get, gradients.get), expected)


def test_gradient_criteria_need_gradients(example):
    group, weights, _ = example
    with pytest.raises(ValueError, match="'taylor' needs gradients"):
        importance.get("taylor").score(group, weights.get)


def test_random_depends_on_seed_and_group_only(example):
    group, weights, _ = example
    criterion = importance.get("random")
    first = criterion.score(group, weights.get)
    assert np.array_equal(first, criterion.score(group, weights.get))
    assert not np.array_equal(first, type(criterion)(seed=1).score(group, weights.get))


def test_not_finite_values_name_the_parameter(example):
    group, weights, gradients = example
    weights["b.weight"][2, 1] = np.nan
    with pytest.raises(WeightsError, match=r"^b\.weight: 1 of 30 values"):
        importance.get("balanced_l2").score(group, weights.get)
    weights["b.weight"][2, 1] = 0
    gradients["c.weight"][0] = np.inf
    with pytest.raises(WeightsError, match=r"^gradient of c\.weight: 27 of 108 values"):
        importance.get("fisher").score(group, weights.get, gradients.get)


def test_shape_that_does_not_fit(example):
    group, weights, _ = example
    weights["a.weight"] = np.ones((7, 3))
    with pytest.raises(WeightsError, match=r"a\.weight: axis 0 of shape \(7, 3\) does not hold 6 channels"):
        importance.get("balanced_l2").score(group, weights.get)


def test_registry():
    for name in importance.names():
        assert importance.get(name).name == name
    with pytest.raises(ConfigError, match="'balanced_l3' is unknown; did you mean 'balanced_l2'"):
        importance.get("balanced_l3")
    with pytest.raises(ConfigError, match="no method score"):
        importance.get(object())  # type: ignore[arg-type]

    class Constant(importance.Importance):
        name = "constant"

        def score(self, group, weights, gradients=None):
            return np.zeros(group.units)

    assert isinstance(importance.get(Constant), Constant)
    mine = Constant()
    assert importance.get(mine) is mine


def test_grouped_filters_are_summed_alike_in_both_layouts() -> None:
    """[out, in / groups, taps] and [taps, in / groups, out] hold the same filter."""
    torch_layout = np.random.default_rng(0).random((6, 2, 3, 3))
    positions = np.arange(6)
    inner = Member("weight", 1, Role.CONSUMES, 6, positions, positions, 3)
    last = Member("weight", 2, Role.CONSUMES, 6, positions, positions, 3)
    expected = [torch_layout[2 * g : 2 * g + 2, i].sum() for g in range(3) for i in range(2)]
    np.testing.assert_allclose(channel_sums(inner, torch_layout), expected)
    np.testing.assert_allclose(channel_sums(last, torch_layout.transpose(2, 3, 1, 0)), expected)
