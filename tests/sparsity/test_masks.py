"""Masks against a plain reference that sorts each group on its own, in Python."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openwork.sparsity.masks import _mask_elsewhere, apply_mask_, check, nm_mask


def _reference(weight: np.ndarray, n: int, m: int, axis: int, blocks: int = 1) -> np.ndarray:
    """Group by group: stable sort by falling magnitude, keep the first n."""
    moved = np.moveaxis(weight, axis, -1)
    mask = np.zeros(moved.shape, dtype=bool)
    length = moved.shape[-1]
    part = length // blocks
    for index in np.ndindex(moved.shape[:-1]):
        for block in range(blocks):
            for start in range(block * part, (block + 1) * part, m):
                stop = min(start + m, (block + 1) * part)
                values = [abs(float(value)) for value in moved[index][start:stop]]
                order = sorted(range(len(values)), key=lambda position: (-values[position], position))
                for position in order[:n]:
                    mask[(*index, start + position)] = True
    return np.moveaxis(mask, -1, axis)


def _drawn(rng: np.random.Generator, shape: tuple[int, ...], ties: bool) -> np.ndarray:
    return rng.integers(-3, 4, shape).astype(np.float32) if ties else rng.standard_normal(shape, dtype=np.float32)


@settings(max_examples=80, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    m=st.integers(2, 16),
    data=st.data(),
    ties=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_pattern_axis_and_shape_agrees_with_the_reference(shape, m, data, ties, seed):
    n = data.draw(st.integers(1, m - 1))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    weight = _drawn(np.random.default_rng(seed), tuple(shape), ties)
    expected = _reference(weight, n, m, axis)
    np.testing.assert_array_equal(nm_mask(weight, n, m, axis), expected)
    np.testing.assert_array_equal(nm_mask(torch.from_numpy(weight), n, m, axis).numpy(), expected)
    elsewhere = _mask_elsewhere(torch, torch.from_numpy(weight), n, m, axis % len(shape), 1)
    np.testing.assert_array_equal(elsewhere.numpy(), expected)


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("axis", [0, 1])
def test_two_of_four_with_every_tail(length, axis):
    shape = [6, 6, 3]
    shape[axis] = length
    weight = _drawn(np.random.default_rng(length), tuple(shape), ties=True)
    np.testing.assert_array_equal(nm_mask(weight, axis=axis), _reference(weight, 2, 4, axis))


def test_all_orders_of_four_values_with_ties():
    weight = np.array(list(itertools.product([-2, -1, 0, 1, 2], repeat=4)), dtype=np.float32)
    np.testing.assert_array_equal(nm_mask(weight), _reference(weight, 2, 4, 1))


def test_equal_values_keep_the_lower_positions():
    assert nm_mask(np.ones((1, 4))).tolist() == [[True, True, False, False]]
    assert nm_mask(np.ones((1, 7))).tolist() == [[True, True, False, False, True, True, False]]
    assert nm_mask(np.ones((1, 2))).tolist() == [[True, True]]


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.int8, np.int16, np.int32, np.uint8]
)
def test_numpy_element_types(dtype):
    rng = np.random.default_rng(3)
    weight = rng.integers(0 if dtype == np.uint8 else -128, 128, (32, 24)).astype(dtype)
    np.testing.assert_array_equal(nm_mask(weight), _reference(weight, 2, 4, 1))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8]
)
def test_torch_element_types(dtype):
    weight = (torch.randn(16, 12, 3, 3, generator=torch.Generator().manual_seed(0)) * 40).to(dtype)
    expected = _reference(weight.to(torch.float64).numpy(), 2, 4, 1)
    mask = nm_mask(weight)
    assert mask.dtype == torch.bool
    assert mask.shape == weight.shape
    np.testing.assert_array_equal(mask.numpy(), expected)
    np.testing.assert_array_equal(_mask_elsewhere(torch, weight, 2, 4, 1, 1).numpy(), expected)


def test_the_most_negative_integer_is_the_largest_magnitude():
    weight = np.array([[127, -128, 127, 126]], dtype=np.int8)
    assert nm_mask(weight).tolist() == [[True, True, False, False]]
    assert nm_mask(torch.from_numpy(weight[:, [3, 0, 2, 1]].copy())).tolist() == [[False, True, False, True]]


def test_nan_and_infinity_stay_and_the_pattern_holds():
    weight = np.array([[np.nan, np.inf, -np.inf, 9.0], [np.nan] * 4, [-0.0, 0.0, -1e-40, 0.0]], dtype=np.float32)
    mask = nm_mask(weight)
    assert mask.tolist() == [[True, True, False, False], [True, True, False, False], [True, False, True, False]]
    assert (nm_mask(torch.from_numpy(weight)).numpy() == mask).all()


def test_large_arrays_are_worked_through_in_pieces():
    rng = np.random.default_rng(5)
    for shape, axis in (((700, 1024), 1), ((64, 515, 3, 3), 1), ((130, 40, 5, 5), 0)):
        weight = rng.standard_normal(shape, dtype=np.float32)
        weight[:3] = np.round(weight[:3])
        moved = np.moveaxis(weight, axis, -1)
        padded = np.pad(np.abs(moved), [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % 4)])
        groups = padded.reshape(*padded.shape[:-1], -1, 4)
        order = np.argsort(-groups, axis=-1, kind="stable")
        expected = np.zeros(groups.shape, dtype=bool)
        np.put_along_axis(expected, order[..., :2], True, axis=-1)
        expected = np.moveaxis(expected.reshape(padded.shape)[..., : moved.shape[-1]], -1, axis)
        np.testing.assert_array_equal(nm_mask(weight, axis=axis), expected)


def test_non_contiguous_weights_and_blocks():
    weight = _drawn(np.random.default_rng(1), (9, 14, 4), ties=True)
    np.testing.assert_array_equal(nm_mask(weight.T, axis=1), _reference(weight.T, 2, 4, 1))
    np.testing.assert_array_equal(
        nm_mask(torch.from_numpy(weight).mT, axis=2).numpy(), _reference(np.swapaxes(weight, 1, 2), 2, 4, 2)
    )
    np.testing.assert_array_equal(nm_mask(weight, axis=1, blocks=2), _reference(weight, 2, 4, 1, blocks=2))


def test_empty_weights():
    assert nm_mask(np.zeros((0, 8))).shape == (0, 8)
    assert nm_mask(np.zeros((3, 0))).shape == (3, 0)
    assert check(np.zeros((3, 0))).holds


def test_check_tells_where():
    weight = np.zeros((3, 10, 2), dtype=np.float32)
    assert check(weight)
    assert check(weight).zeros == 1.0
    weight[1, 4:7, 1] = 1
    report = check(weight)
    assert not report.holds
    assert (report.broken, report.first, report.groups) == (1, (1, 4, 1), 3 * 3 * 2)
    weight[2, :3, 0] = np.nan
    assert check(torch.from_numpy(weight)).broken == 2
    assert check(weight, axis=2) == check(weight, axis=-1)
    dense = np.ones((8, 8))
    assert check(dense, axis=0, n=4, m=8).first == (0, 0)
    assert check(dense * nm_mask(dense, 4, 8, 0), axis=0, n=4, m=8).holds


def test_applying_a_mask_leaves_exact_zeros_even_of_nan():
    weight = torch.full((2, 4), float("nan"))
    assert apply_mask_(weight, nm_mask(weight)) is weight
    assert (weight[:, 2:] == 0).all()
    array = np.full((2, 4), -np.inf)
    apply_mask_(array, nm_mask(array))
    assert (array[:, 2:] == 0).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 4, "m": 4}, "4:4"),
        ({"n": 0, "m": 4}, "0:4"),
        ({"n": 2, "m": 17}, "2:17"),
        ({"axis": 2}, "axis 2"),
        ({"blocks": 3}, "3 equal blocks"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        nm_mask(np.ones((4, 8)), **arguments)


@pytest.mark.parametrize("weight", [[1, 2, 3, 4], np.ones((4, 4), dtype=bool), torch.ones(4, 4, dtype=torch.complex64)])
def test_other_kinds_of_weight_are_refused(weight):
    with pytest.raises(TypeError):
        nm_mask(weight)
