"""Weights with the 2:4 pattern for tests."""

from __future__ import annotations

import numpy as np


def random_24(rng: np.random.Generator, shape: tuple[int, ...], axis: int, blocks: int, dtype, zero_point: int = 0):
    """A weight with 0, 1 or 2 non-zeros in each group, special values among them."""
    dtype = np.dtype(dtype)
    cin = shape[axis] // blocks
    rest = [n for i, n in enumerate(shape) if i != axis]
    integer = dtype.kind in "iu" or "int4" in dtype.name
    flat = np.full((blocks, *rest, cin), zero_point, np.int64 if integer else np.float64)
    pool: list[float] = [1, 2, 3, 5, 7]
    if not integer:
        pool += [-0.0, -0.0, float("nan"), -1.5, 0.25]
        pool += [float("inf")] if "e4m3fn" not in dtype.name else []
    drawn = rng.choice(np.array(pool, flat.dtype), flat.shape)
    allowed = np.zeros(flat.shape, bool)
    for start in range(0, cin, 4):
        width = min(4, cin - start)
        order = np.argsort(rng.random((*flat.shape[:-1], width)), axis=-1)
        count = rng.integers(0, 3, flat.shape[:-1])[..., None]
        allowed[..., start : start + width] = order < count
    flat[allowed] = drawn[allowed]
    if flat.dtype == np.float64:
        flat[~allowed & (rng.random(flat.shape) < 0.3)] = -0.0
    full = np.moveaxis(flat, -1, 0)  # [cin, blocks, *rest]
    full = np.swapaxes(full, 0, 1).reshape(blocks * cin, *rest)
    result = np.ascontiguousarray(np.moveaxis(full, 0, axis)).astype(dtype)
    if dtype == np.float32:  # a NaN with a payload of its own, and a signalling one
        raw = result.view(np.uint32)
        raw[np.isnan(result)] = rng.choice([0x7FC12345, 0xFFA00001], int(np.isnan(result).sum()))
    return result
