"""Compiled loops against NumPy, bit for bit, and what happens without them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openwork.sparsity import compiled, masks, nm_mask

pytest.importorskip("numba")
FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


def _by_numpy(weight, n, m, axis, blocks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "kernels", lambda: None)
        return nm_mask(weight, n, m, axis, blocks)


def _by_loops(weight, n, m, axis, blocks):
    calls = []
    chooser = masks.compiled_chooser

    def counted(*args):
        calls.append(args)
        return chooser(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "LEAST", 1)
        patch.setattr(masks, "compiled_chooser", counted)
        patch.setattr(masks, "_ROW", 96)  # several rows even in small weights
        masks._above.cache_clear()
        mask = nm_mask(weight, n, m, axis, blocks)
        masks._above.cache_clear()
    assert calls
    return mask


def _drawn(seed, shape, dtype):
    rng = np.random.default_rng(seed)
    weight = rng.choice([rng.standard_normal(shape), rng.integers(-2, 3, shape).astype(float)]).astype(dtype)
    odd = rng.random(shape) < 0.1
    weight[odd] = rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-7], dtype=dtype), shape)[odd]
    return weight


@settings(max_examples=150, deadline=None)
@given(
    shape=st.lists(st.integers(1, 13), min_size=1, max_size=4),
    m=st.integers(2, 16),
    dtype=st.sampled_from(FLOATS),
    data=st.data(),
    seed=st.integers(0, 10_000),
)
def test_masks_are_those_of_numpy(shape, m, dtype, data, seed):
    n = data.draw(st.integers(1, m - 1))
    axis = data.draw(st.integers(0, len(shape) - 1))
    blocks = data.draw(st.sampled_from([size for size in (1, 2, 3) if shape[axis] % size == 0]))
    weight = _drawn(seed, shape, dtype)
    np.testing.assert_array_equal(_by_loops(weight, n, m, axis, blocks), _by_numpy(weight, n, m, axis, blocks))


@pytest.mark.parametrize("shape", [(64, 1030), (33, 512, 3, 3), (7, 3, 5000), (1, 70001)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_large_weights_of_every_float(shape, dtype):
    weight = _drawn(1, shape, dtype)
    np.testing.assert_array_equal(nm_mask(weight), _by_numpy(weight, 2, 4, 1, 1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_products_have_the_bits_of_numpys(dtype):
    weight = _drawn(2, (40, 36, 3), dtype).reshape(-1)
    mask = np.random.default_rng(0).random(weight.size) < 0.5
    expected = weight * mask
    kernels = compiled.kernels()
    out = np.empty_like(weight)
    kernels.multiply(weight, mask, out)
    kernels.multiply_in_place(weight, mask)
    number = ~np.isnan(expected)  # Of a NaN only that it is one counts.
    for found in (out, weight):
        assert (found[number].view(np.uint8) == expected[number].view(np.uint8)).all()
        assert np.isnan(found[~number]).all()


def test_small_weights_do_not_load_numba():
    code = (
        "import sys, numpy as np; from openwork.sparsity import nm_mask;"
        "nm_mask(np.ones((8, 8), np.float32)); print('numba' in sys.modules);"
        "nm_mask(np.ones((256, 256), np.float32)); print('numba' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]


@pytest.fixture
def _uncached():
    compiled.kernels.cache_clear()
    yield
    compiled.kernels.cache_clear()


@pytest.mark.usefixtures("_uncached")
def test_without_numba_numpy_chooses_silently(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    weight = _drawn(3, (256, 300), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mask = nm_mask(weight)
    assert compiled.kernels() is None
    np.testing.assert_array_equal(mask, _by_numpy(weight, 2, 4, 1, 1))


@pytest.mark.usefixtures("_uncached")
def test_a_numba_that_does_not_load_is_named_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # its import raises ImportError
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    weight = _drawn(3, (256, 300), np.float32)
    with pytest.warns(RuntimeWarning, match="numba does not load, NumPy is used"):
        nm_mask(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nm_mask(weight)
