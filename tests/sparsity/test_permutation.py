"""The search for a better order of channels, judged by sorting each group."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from openwork.sparsity import permutation
from openwork.sparsity.permutation import kept_magnitude, search_permutation


def _kept(rows: np.ndarray) -> float:
    """The two largest of each four neighbours, by sorting."""
    magnitudes = np.abs(rows.astype(np.float64))
    magnitudes = np.pad(magnitudes, ((0, 0), (0, -rows.shape[1] % 4)))
    return float(np.sort(magnitudes.reshape(len(rows), -1, 4), axis=-1)[..., 2:].sum())


def _normal(rows: int, channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, channels), dtype=np.float32)


@pytest.mark.parametrize("channels", [0, 1, 3, 4, 5, 8, 13, 64])
def test_the_result_is_an_order_and_its_numbers_are_true(channels):
    rows = _normal(16, channels)
    result = search_permutation(rows, seconds=0.05)
    assert sorted(result.order) == list(range(channels))
    assert result.before == pytest.approx(_kept(rows), rel=1e-6)
    assert result.after == pytest.approx(_kept(rows[:, result.order]), rel=1e-6)
    assert kept_magnitude(rows) == pytest.approx(_kept(rows), rel=1e-6)
    largest = np.sort(np.abs(rows), axis=1)[:, channels - channels // 2 :].sum()
    assert result.best_possible == pytest.approx(largest, rel=1e-6)
    assert result.after >= result.before


def test_two_groups_get_the_best_of_all_divisions():
    rows = _normal(5, 8, seed=3)
    best = max(
        _kept(rows[:, [*first, *sorted(set(range(8)) - set(first))]]) for first in itertools.combinations(range(8), 4)
    )
    assert search_permutation(rows, seconds=0.1).after == pytest.approx(best, rel=1e-6)


def test_a_hidden_perfect_order_is_found():
    # Two of each four channels are zero, then shuffled: an order exists that loses nothing.
    rows = _normal(32, 48)
    rows[:, 24:] = 0
    rows = rows[:, np.concatenate([np.arange(0, 24), np.arange(24, 48)])]
    result = search_permutation(rows, seconds=0.5)
    assert result.gain == pytest.approx(1.0, abs=1e-6)


def test_a_third_of_the_possible_gain_on_random_weights():
    gains = [search_permutation(_normal(64, 128, seed), seconds=1.0, seed=seed).gain for seed in range(3)]
    assert min(gains) >= 0.32


def test_channels_stay_in_their_block():
    rows = _normal(16, 48)
    result = search_permutation(rows, seconds=0.1, blocks=3)
    for block in range(3):
        assert sorted(result.order[16 * block : 16 * block + 16]) == list(range(16 * block, 16 * block + 16))
    uneven = search_permutation(_normal(16, 20), seconds=0.1, blocks=2)
    assert uneven.before == pytest.approx(_kept(_normal(16, 20)[:, :10]) + _kept(_normal(16, 20)[:, 10:]), rel=1e-6)


def test_bad_input():
    with pytest.raises(ValueError, match="3 axes"):
        search_permutation(np.ones((2, 3, 4)))
    with pytest.raises(ValueError, match="10 channels"):
        search_permutation(np.ones((2, 10)), blocks=3)


def test_a_small_search_ends_by_itself_and_is_the_same_each_time(monkeypatch):
    monkeypatch.setattr(permutation.time, "monotonic", lambda: 0.0)  # no deadline is ever reached
    results = [search_permutation(_normal(16, 20)) for _ in range(2)]
    assert results[0].order.tolist() == results[1].order.tolist()
    assert results[0].gain > 0.2
