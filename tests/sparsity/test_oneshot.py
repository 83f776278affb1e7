"""One-shot masks: the pattern, and the error of the layer's output, computed from its data."""

from __future__ import annotations

import numpy as np
import pytest

from openwork.sparsity.oneshot import magnitude, sparse_gpt, wanda


def _layer(columns: int = 64, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight, and features that are correlated and of unequal size."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((columns, columns)) * np.exp(rng.standard_normal(columns))
    return rng.standard_normal((24, columns)), rng.standard_normal((512, columns)) @ mixing


def _error(weight: np.ndarray, other: np.ndarray, features: np.ndarray) -> float:
    return float(np.square(features @ (weight - other).T).sum())


def _two_of_four(mask: np.ndarray) -> bool:
    return all(
        mask[row, start : start + 4].sum() == 2 for row in range(len(mask)) for start in range(0, mask.shape[1], 4)
    )


@pytest.mark.parametrize("seed", range(3))
def test_what_knows_more_of_the_data_loses_less(seed):
    weight, features = _layer(seed=seed)
    by_size = magnitude(weight)
    by_norm = wanda(weight, np.linalg.norm(features, axis=0))
    updated, mask = sparse_gpt(weight, features.T @ features)
    assert _two_of_four(by_size)
    assert _two_of_four(by_norm)
    assert _two_of_four(mask)
    assert not updated[~mask].any()
    errors = [_error(weight, other, features) for other in (updated, weight * by_norm, weight * by_size)]
    assert errors[0] < errors[1] < errors[2]


def test_wanda_is_the_rule_written_out():
    weight, features = _layer(12)
    norms = np.sqrt(np.square(features).sum(0))
    mask = wanda(weight, norms)
    for row in range(len(weight)):
        for start in range(0, 12, 4):
            scores = [abs(weight[row, start + j]) * norms[start + j] for j in range(4)]
            assert {start + j for j in np.argsort(scores)[2:]} == set(
                np.flatnonzero(mask[row, start : start + 4]) + start
            )


def test_independent_features_of_one_size_need_no_update():
    weight = np.random.default_rng(0).standard_normal((6, 16))
    updated, mask = sparse_gpt(weight, np.eye(16))
    assert (mask == magnitude(weight)).all()
    np.testing.assert_allclose(updated, weight * mask, atol=1e-12)


def test_the_size_of_blocks_does_not_matter():
    weight, features = _layer(40)
    one = sparse_gpt(weight, features.T @ features, block=8)
    other = sparse_gpt(weight, features.T @ features, block=40)
    assert (one[1] == other[1]).all()
    np.testing.assert_allclose(one[0], other[0], rtol=1e-6, atol=1e-9)


def test_the_remaining_columns_are_the_best_for_their_mask():
    # With all pruned columns before the kept ones, the sequential update is the least-squares solution.
    rng = np.random.default_rng(1)
    features = rng.standard_normal((200, 8)) @ rng.standard_normal((8, 8))
    weight = rng.standard_normal((3, 8)) + np.array([0, 0, 50, 50, 0, 0, 50, 50])
    updated, mask = sparse_gpt(weight, features.T @ features, damping=0.0)
    assert (mask == (np.arange(8) % 4 >= 2)).all()
    # The last group loses columns 4, 5 and only 6, 7 can still answer; the first two answers are 2, 3, 6, 7.
    last = features[:, 6:]
    target = features @ weight.T - features[:, 2:4] @ updated[:, 2:4].T
    best, *_ = np.linalg.lstsq(last, target, rcond=None)
    np.testing.assert_allclose(updated[:, 6:], best.T, rtol=1e-6)


def test_features_that_are_always_zero_and_short_groups():
    weight, features = _layer(10)
    features[:, 3] = 0
    updated, mask = sparse_gpt(weight, features.T @ features)
    assert np.isfinite(updated).all()
    assert (mask[:, 8:].sum(1) == 2).all()
    assert not updated[:, 3].any()


def test_sizes_must_fit():
    with pytest.raises(ValueError, match="norms"):
        wanda(np.ones((2, 8)), np.ones(7))
    with pytest.raises(ValueError, match="second moment"):
        sparse_gpt(np.ones((2, 8)), np.eye(7))
