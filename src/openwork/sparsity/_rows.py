"""A weight seen as rows of groups of four: cut into pieces that fit the cache, zeros told from values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from openwork.errors import ConversionError

Array = npt.NDArray[Any]

__all__ = [
    *("NIBBLES", "Array", "Zero", "chunks", "codes_of", "copy_blocks", "negative_zeros_of", "non_zero", "rows_of"),
    "zero_of",
]

# Elements handled at once: temporary arrays stay inside the processor's cache.
_CHUNK = 1 << 17
# An axis with steps of so many bytes is read by way of a small block, and pieces are larger so that a block reads
# whole cache lines.
_FAR_STRIDE = 512
_BLOCK = 128
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NIBBLES = ("int4", "uint4")


def is_far(moved: Array) -> bool:
    return moved.ndim > 1 and abs(moved.strides[-1]) >= _FAR_STRIDE


def chunks(moved: Array) -> Iterator[tuple[tuple[Any, ...], slice]]:
    """Cut an array [*rest, row] into pieces of whole rows, small enough for the cache.

    Yields (index into the array, slice of the rows that this piece is).
    """
    shape = moved.shape
    lead = shape[:-1]
    chunk = _CHUNK * (2 if moved.itemsize > 2 else 4) if is_far(moved) else _CHUNK
    if not lead:
        yield (None, slice(None)), slice(0, 1)
        return
    axis = 0
    while axis < len(lead) - 1 and math.prod(shape[axis + 1 :]) > chunk:
        axis += 1
    rows_below = math.prod(lead[axis + 1 :])
    step = max(1, chunk // max(1, rows_below * shape[-1]))
    row = 0
    for outer in np.ndindex(*lead[:axis]):
        for start in range(0, lead[axis], step):
            count = min(step, lead[axis] - start) * rows_below
            yield (*outer, slice(start, start + step)), slice(row, row + count)
            row += count


@dataclass(frozen=True)
class Zero:
    """How to tell zeros in the unsigned view of a dtype."""

    bits: Any  # dtype of the view
    value: int  # bit pattern of zero
    magnitude: int | None  # mask that clears the sign of floating-point numbers
    mask: int | None  # bits that count, for 4-bit integers kept in bytes


def zero_of(dtype: np.dtype[Any], zero_point: int) -> Zero:
    if dtype.itemsize not in _UNSIGNED or dtype.kind in "bcmOSUM" or dtype.type is np.void:
        raise ConversionError(
            f"a weight of type {dtype} cannot be packed; allowed: integers and floats of 4 to 64 bits"
        )
    bits: Any = _UNSIGNED[dtype.itemsize]
    width = 8 * dtype.itemsize
    name = dtype.name
    if dtype.kind in "iu" or name in NIBBLES:
        value = int(np.array(zero_point).astype(dtype).view(bits))
        if name in NIBBLES:
            return Zero(bits, value & 15, None, 15)
        return Zero(bits, value, None, None)
    if zero_point:
        raise ConversionError(f"zero-point {zero_point}: a weight of type {dtype} can only have zero-point 0")
    # The "fnuz" 8-bit floats have no negative zero: that pattern is their NaN.
    magnitude = None if name.endswith(("fnuz", "e8m0fnu")) else (1 << (width - 1)) - 1
    return Zero(bits, 0, magnitude, None)


def rows_of(moved: Array, where: tuple[Any, ...], padded: int, zero: Zero) -> Array:
    """One piece as contiguous unsigned [rows, padded]."""
    piece = moved[where]
    cin = piece.shape[-1]
    if padded == cin and not is_far(piece):
        return np.ascontiguousarray(piece).view(zero.bits).reshape(-1, cin)
    rows = np.empty((*piece.shape[:-1], padded), zero.bits)
    rows[..., cin:] = zero.value
    copy_blocks(piece, rows[..., :cin].view(piece.dtype))
    return rows.reshape(-1, padded)


def copy_blocks(source: Array, target: Array) -> None:
    """Copy between arrays of which one has a far last axis: by blocks, or each element would miss the cache."""
    if not (is_far(source) or is_far(target)):
        target[...] = source
        return
    for start in range(0, source.shape[-1], _BLOCK):
        part = slice(start, start + _BLOCK)
        block = source[..., part]
        if is_far(source):
            block = np.moveaxis(np.ascontiguousarray(np.moveaxis(block, -1, 0)), 0, -1)
            target[..., part] = block
        else:
            np.moveaxis(target, -1, 0)[part] = np.ascontiguousarray(np.moveaxis(block, -1, 0))


def codes_of(rows: Array, zero: Zero) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Non-zero patterns, one code per eight elements, and the non-zero flags themselves."""
    if zero.magnitude is not None:
        flags = (rows & rows.dtype.type(zero.magnitude)) != 0
    elif zero.mask is not None:
        flags = (rows & rows.dtype.type(zero.mask)) != zero.value
    else:
        flags = rows != zero.value
    return gather_bits(flags), flags


def gather_bits(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Eight flags to one number with flag e in bit e."""
    # The product lines the eight 0/1 bytes up in the top byte; no two terms share a bit, so nothing carries.
    wide = flags.reshape(-1).view(np.dtype("<u8"))
    return ((wide * np.uint64(0x0102040810204080)) >> np.uint64(56)).astype(np.intp)


def negative_zeros_of(rows: Array, zero: Zero) -> npt.NDArray[np.intp] | None:
    """Bits of the elements that are -0.0, one number per eight elements; None when there is none."""
    if zero.magnitude is None:
        return None
    flags = rows == rows.dtype.type(zero.magnitude + 1)
    return gather_bits(flags) if flags.any() else None


def non_zero(slots: Array, zero: Zero) -> npt.NDArray[np.bool_]:
    if zero.magnitude is not None:
        return (slots & slots.dtype.type(zero.magnitude)) != 0
    if zero.mask is not None:
        return (slots & slots.dtype.type(zero.mask)) != zero.value
    return slots != zero.value
