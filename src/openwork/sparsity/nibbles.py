"""Two 4-bit numbers to a byte, as ONNX stores them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

__all__ = ["pack_nibbles", "unpack_nibbles"]


def pack_nibbles(numbers: Array) -> npt.NDArray[np.uint8]:
    """Two 4-bit numbers to a byte, the first in the low half, an odd count padded with 0; C order.

    Args:
        numbers: any integer dtype, or int4 / uint4 of ml_dtypes; the low four bits count.
    """
    flat = np.ascontiguousarray(numbers).reshape(-1)
    data = np.zeros((len(flat) + 1) // 2 * 2, np.uint8)
    data[: len(flat)] = flat.view(np.uint8) if flat.dtype.itemsize == 1 else flat.astype(np.uint8)
    data &= 15
    data[::2] |= data[1::2] << 4
    return data[::2].copy()


def unpack_nibbles(data: Array, count: int, *, signed: bool) -> Array:
    """`count` 4-bit numbers from bytes that hold two each, as int8 (signed) or uint8."""
    data = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.view(np.uint8)
    numbers = np.empty(2 * len(data), np.uint8)
    numbers[::2], numbers[1::2] = data & 15, data >> 4
    numbers = numbers[:count]
    if signed:
        return ((numbers ^ 8).astype(np.int8) - 8).astype(np.int8)
    return numbers
