"""2:4 metadata of NVIDIA's sparse tensor cores, from and to the index of `openwork.sparsity.pack24`.

NVIDIA's nibble is ``i0 | i1 << 2`` with 0 <= i0 < i1 <= 3, so an index byte with ordered slots plus 0x44 is a
metadata byte (PTX ISA, "sparse matrix storage").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from openwork.errors import ConversionError
from openwork.sparsity.pack24 import Packed24

__all__ = ["cutlass_metadata", "from_cutlass_metadata", "from_nvidia", "to_nvidia"]

_SHIFT = np.uint8(0x44)


def to_nvidia(packed: Packed24) -> npt.NDArray[np.uint8]:
    """Metadata bytes [*rest, padded / 8] in row order, first group in the low nibble.

    The values of `packed` are the compressed operand as they are.

    Raises:
        ConversionError: the style of `packed` is not an ordered one (canonical or torch).
    """
    if packed.style not in ("canonical", "torch"):
        raise ConversionError(f"style {packed.style!r} has no NVIDIA metadata; allowed: canonical, torch")
    return packed.index + _SHIFT


def from_nvidia(
    values: npt.NDArray[Any], metadata: npt.NDArray[Any], cin: int, axis: int = 1, *, blocks: int = 1
) -> Packed24:
    """The storage that values and row-order metadata bytes describe; inverse of `to_nvidia`.

    Args:
        values: [*rest, padded / 2].
        metadata: uint8 or int8 [*rest, padded / 8].
        cin: true length of the packed axis.
        axis: the axis of the weight.
        blocks: see `Packed24`.

    Raises:
        ConversionError: a nibble with i0 >= i1.
    """
    metadata = np.ascontiguousarray(metadata).view(np.uint8)
    for shift in (0, 4):
        first, second = metadata >> shift & 3, metadata >> (shift + 2) & 3
        wrong = first >= second
        if wrong.any():
            place = int(np.argmax(wrong))
            raise ConversionError(f"metadata byte {place} is 0x{int(metadata.flat[place]):02x}: its pairs must ascend")
    return Packed24(values, metadata - _SHIFT, cin, axis, blocks)


def cutlass_metadata(packed: Packed24) -> npt.NDArray[Any]:
    """Metadata in the order in which CUTLASS's sparse GEMM (and torch.sparse) reads it.

    Args:
        packed: of a 2-D weight [M, K] along axis 1, in style ``torch`` if it shall equal torch.sparse's own for
            groups with fewer than two non-zeros. 8-bit values need M % 16 == 0 and K % 32 == 0, 16-bit values
            M % 32 == 0 and K % 16 == 0.

    Returns:
        int32 [M, K / 32] for 8-bit values, int16 [M, K / 16] for 16-bit values.
    """
    metadata = to_nvidia(packed)
    size = packed.values.dtype.itemsize
    if metadata.ndim != 2 or size not in (1, 2):
        raise ConversionError(
            f"values of type {packed.values.dtype}, shape {list(packed.values.shape)}: CUTLASS metadata is for "
            "2-D weights of 8 or 16 bits"
        )
    kind = np.dtype("<i4") if size == 1 else np.dtype("<i2")
    rows, unit = (16, 32) if size == 1 else (32, 16)
    if metadata.shape[0] % rows or packed.cin % unit:
        raise ConversionError(
            f"weight {metadata.shape[0]} x {packed.cin}: CUTLASS metadata needs a multiple of {rows} x {unit}"
        )
    plain = np.ascontiguousarray(metadata).view(kind)
    ordered = np.empty(plain.size, kind)
    ordered[_cutlass_places(plain.shape[0], plain.shape[1], size)] = plain
    return ordered.reshape(plain.shape)


def from_cutlass_metadata(values: npt.NDArray[Any], metadata: npt.NDArray[Any]) -> Packed24:
    """Inverse of `cutlass_metadata`: values [M, K / 2] and int32 or int16 metadata to a storage."""
    size = values.dtype.itemsize
    kind = np.dtype("<i4") if size == 1 else np.dtype("<i2")
    if metadata.ndim != 2 or metadata.dtype != kind:
        raise ConversionError(f"metadata of type {metadata.dtype}; allowed for {values.dtype} values: 2-D {kind}")
    plain = np.ascontiguousarray(metadata).reshape(-1)[_cutlass_places(metadata.shape[0], metadata.shape[1], size)]
    cin = 2 * values.shape[-1]
    return replace(from_nvidia(values, plain.view(np.uint8), cin), style="torch")


def _cutlass_places(rows: int, columns: int, itemsize: int) -> npt.NDArray[np.intp]:
    """[rows, columns]: where element (r, c) of row-order metadata stands in CUTLASS's layout.

    The layout (column-major, interleaved by two, rows shuffled inside blocks of 32 or 16, 2 x 2 blocks swizzled)
    is the one of CUTLASS's host-side reordering for sparse GEMM.
    """
    block, ways = (16, 2) if itemsize == 1 else (32, 4)
    row = np.arange(rows)[:, None]
    column = np.arange(columns)[None, :]
    row = row // block * block + row % 8 * ways + row % block // 8
    odd_row, odd_column = row % 2, column % 2
    swap = (1 - odd_row) * odd_column - odd_row * (1 - odd_column)
    row, column = row + swap, column - swap
    return column // 2 * (2 * rows) + 2 * row + column % 2
