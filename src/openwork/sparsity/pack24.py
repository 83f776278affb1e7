"""2:4 storage: half of the values and two 2-bit indices per group of four, and back, bit for bit.

    w[idx0] = v0, w[1 + idx1] = v1, everything else zero;   nibble = idx0 | idx1 << 2

The format is the one that Huawei's CANN documents for ``alg="weight_sparse_4_2"``. Groups of four run along one
axis (the input channels). That axis is moved to the end and padded with zeros to a multiple of eight, so that each
row has whole index bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from openwork.errors import ConversionError
from openwork.sparsity._index import STYLES, TOO_MANY, nibble_positions, source_table, style_tables
from openwork.sparsity._rows import (
    NIBBLES,
    Array,
    Zero,
    chunks,
    codes_of,
    copy_blocks,
    negative_zeros_of,
    non_zero,
    rows_of,
    zero_of,
)

__all__ = [
    "Not24Error",
    "Packed24",
    "Pattern24",
    "check24",
    "pack24",
    "packed_shapes",
    "unpack24",
]


class Not24Error(ConversionError):
    """A group of four holds more than two non-zeros; `pattern` says how many and where."""

    def __init__(self, message: str, pattern: Pattern24) -> None:
        super().__init__(message)
        self.pattern = pattern


@dataclass(frozen=True)
class Pattern24:
    """What `check24` found.

    Attributes:
        groups: number of groups of four (a ragged tail counts as one).
        bad_groups: groups with more than two non-zeros.
        first_bad: position in the weight of the first element of the first bad group, or None.
        zeros: elements equal to zero (to the zero-point), padding not counted.
        size: elements of the weight.
        hidden_negative_zeros: some -0.0 falls on a place that is not stored (canonical style).
    """

    groups: int
    bad_groups: int
    first_bad: tuple[int, ...] | None
    zeros: int
    size: int
    hidden_negative_zeros: bool

    @property
    def qualifies(self) -> bool:
        return self.bad_groups == 0


@dataclass(frozen=True, eq=False)
class Packed24:
    """A weight in 2:4 storage. Unpacks as ``values, index, cin``.

    Let *rest* be the weight's shape without the packed axis (with `blocks` in its place when `blocks` > 1).

    Attributes:
        values: [*rest, padded / 2] in the weight's dtype, where padded is `cin` rounded up to a multiple of 8.
        index: uint8 [*rest, padded / 8], two groups per byte, first group in the low nibble.
        cin: true length of the packed axis (of one block).
        axis: the packed axis of the weight, not negative.
        blocks: number of equal blocks that the axis consists of; groups of four start anew in each.
        style: which of `STYLES` wrote the index.
        zero_point: the value that stands for zero.
        negative_zeros: None, or uint8 [*rest, padded / 8]: bit e of a byte is set when element e of its eight
            is a -0.0 that the index does not point at. Without it such an element comes back as +0.0.
    """

    values: Array
    index: npt.NDArray[np.uint8]
    cin: int
    axis: int = -1
    blocks: int = 1
    style: str = "canonical"
    zero_point: int = 0
    negative_zeros: npt.NDArray[np.uint8] | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.values, self.index, self.cin))

    @property
    def nbytes(self) -> int:
        """Bytes of values, index and negative zeros; 4-bit types counted at two to a byte."""
        values = self.values.nbytes
        if self.values.dtype.name in NIBBLES:
            values = (values + 1) // 2
        return values + self.index.nbytes + (0 if self.negative_zeros is None else self.negative_zeros.nbytes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        rest = list(self.index.shape[:-1])
        axis = _positive_axis(self.axis, len(rest) + 1 - (self.blocks > 1))
        if self.blocks > 1:
            del rest[axis]
        rest.insert(axis, self.blocks * self.cin)
        return tuple(rest)


def _positive_axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ConversionError(f"axis {axis} does not exist in a weight with {rank} axes")
    return axis % rank


def _moved(weight: Array, axis: int, blocks: int) -> Array:
    """A view [*rest, cin] of `weight`."""
    length = weight.shape[axis]
    if blocks < 1 or length % blocks:
        raise ConversionError(f"axis {axis} with {length} elements cannot be cut into {blocks} equal blocks")
    if blocks > 1:
        shape = (*weight.shape[:axis], blocks, length // blocks, *weight.shape[axis + 1 :])
        weight, axis = weight.reshape(shape), axis + 1
    return np.moveaxis(weight, axis, -1)


def packed_shapes(shape: tuple[int, ...], axis: int, blocks: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of values and index that `pack24` gives for a weight of `shape`, without packing it."""
    axis = _positive_axis(axis, len(shape))
    rest, cin = list(shape), shape[axis] // blocks
    rest[axis : axis + 1] = [blocks] if blocks > 1 else []
    padded = -(-cin // 8) * 8
    return (*rest, padded // 2), (*rest, padded // 8)


def _checked(weight: Array, axis: int, blocks: int, zero_point: int) -> tuple[Array, int, int, Zero]:
    weight = np.asarray(weight)
    if weight.ndim == 0:
        raise ConversionError("a scalar cannot be packed; a weight needs at least one axis")
    axis = _positive_axis(axis, weight.ndim)
    moved = _moved(weight, axis, blocks)
    return moved, axis, -(-moved.shape[-1] // 8) * 8, zero_of(weight.dtype, zero_point)


_BAD_GROUPS = np.array([((code & 15).bit_count() > 2) + ((code >> 4).bit_count() > 2) for code in range(256)], np.int64)
_ONES = np.array([code.bit_count() for code in range(256)], np.int64)


def check24(weight: Array, axis: int, *, blocks: int = 1, zero_point: int = 0) -> Pattern24:
    """Look whether every group of four along `axis` has at most two non-zeros.

    Args:
        weight: any shape; integer or floating-point, 4-bit types of ml_dtypes included. -0.0 is zero, NaN is not.
        axis: the axis of the input channels.
        blocks: number of equal blocks of the axis in each of which groups start anew (ConvTranspose groups).
        zero_point: the integer that stands for zero.
    """
    moved, axis, padded, zero = _checked(weight, axis, blocks, zero_point)
    tables = style_tables("canonical")
    bad, non_zeros, hidden, first = 0, 0, False, None
    rows_total = math.prod(moved.shape[:-1])
    if moved.size:
        for where, rows_at in chunks(moved):
            rows = rows_of(moved, where, padded, zero)
            codes, _ = codes_of(rows, zero)
            counts = np.bincount(codes, minlength=256)
            non_zeros += int(counts @ _ONES)
            found = int(counts @ _BAD_GROUPS)
            if found and first is None:
                place = int(np.argmax(_BAD_GROUPS[codes] > 0))
                row, column = divmod(place, padded // 8)
                upper_half = (int(codes[place]) & 15).bit_count() <= 2
                first = _position(moved.shape, rows_at.start + row, 8 * column + 4 * upper_half, axis, blocks)
            bad += found
            if not hidden:
                negative = negative_zeros_of(rows, zero)
                hidden = negative is not None and bool((negative & ~tables.covered[codes]).any())
    groups = rows_total * -(-moved.shape[-1] // 4)
    return Pattern24(groups, bad, first, moved.size - non_zeros, moved.size, hidden)


def _position(shape: tuple[int, ...], row: int, column: int, axis: int, blocks: int) -> tuple[int, ...]:
    """Position in the weight of a position in the moved view."""
    rest = [int(place) for place in np.unravel_index(row, shape[:-1])] if len(shape) > 1 else []
    if blocks > 1:
        block = rest.pop(axis)
        column += block * shape[-1]
    rest.insert(axis, column)
    return tuple(rest)


def pack24(weight: Array, axis: int = 1, *, style: str = "canonical", blocks: int = 1, zero_point: int = 0) -> Packed24:
    """Store a 2:4 weight as half of its values and an index.

    Args:
        weight: [...], any integer or floating-point dtype of 8 to 64 bits, or int4 / uint4 of ml_dtypes. Bits
            of values (NaN payloads, infinities) are kept. -0.0 counts as zero; its sign is kept too.
        axis: the axis along which groups of four run: the input channels.
        style: how groups with fewer than two non-zeros are written. ``canonical`` never points twice at one
            element; ``atc`` and ``ascendc`` follow the two manuals of CANN; ``torch`` follows
            torch.sparse's semi-structured converter. All are read by `unpack24`.
        blocks: number of equal blocks of the axis in each of which groups start anew.
        zero_point: the integer that stands for zero.

    Raises:
        Not24Error: a group holds more than two non-zeros.
        ConversionError: unknown style, axis or dtype.

    Example:
        >>> packed = pack24(np.array([[0.0, 1.5, 0.0, -2.0]], np.float32), axis=1)
        >>> packed.values.tolist(), packed.index.tolist(), packed.cin
        ([[1.5, -2.0, 0.0, 0.0]], [[9]], 4)
    """
    if style not in STYLES:
        raise ConversionError(f"style {style!r} is not known; allowed: {', '.join(STYLES)}")
    weight = np.asarray(weight)
    moved, axis, padded, zero = _checked(weight, axis, blocks, zero_point)
    tables = style_tables(style)
    lead = moved.shape[:-1]
    values = np.empty((math.prod(lead), padded // 2), zero.bits)
    index = np.empty((math.prod(lead), padded // 8), np.uint8)
    negative_zeros: npt.NDArray[np.uint8] | None = None
    if moved.size:
        for where, rows_at in chunks(moved):
            rows = rows_of(moved, where, padded, zero)
            codes, _ = codes_of(rows, zero)
            packed_index = tables.index[codes]
            if (packed_index == TOO_MANY).any():
                raise _not24(weight, axis, blocks, zero_point)
            index[rows_at] = packed_index.reshape(-1, padded // 8)
            kept = np.flatnonzero(tables.keep[codes].view(np.bool_))
            target = values[rows_at].reshape(-1)
            np.take(rows.reshape(-1), kept, out=target, mode="clip")
            negative = negative_zeros_of(rows, zero)
            if negative is None:
                continue
            if style in ("atc", "ascendc"):
                # A free slot of these styles may stand on the element of the other slot: it must add nothing.
                target[target == target.dtype.type(zero.magnitude + 1)] = 0  # type: ignore[operator]
                hidden = negative.astype(np.uint8)
            else:
                hidden = (negative & ~tables.covered[codes]).astype(np.uint8)
            if hidden.any():
                if negative_zeros is None:
                    negative_zeros = np.zeros_like(index)
                negative_zeros[rows_at] = hidden.reshape(-1, padded // 8)
    return Packed24(
        values=values.view(weight.dtype).reshape(*lead, padded // 2),
        index=index.reshape(*lead, padded // 8),
        cin=moved.shape[-1],
        axis=axis,
        blocks=blocks,
        style=style,
        zero_point=zero_point,
        negative_zeros=None if negative_zeros is None else negative_zeros.reshape(*lead, padded // 8),
    )


def _not24(weight: Array, axis: int, blocks: int, zero_point: int) -> Not24Error:
    pattern = check24(weight, axis, blocks=blocks, zero_point=zero_point)
    return Not24Error(
        f"weight of shape {list(weight.shape)}: {pattern.bad_groups:,} of {pattern.groups:,} groups along axis "
        f"{axis} have more than two non-zeros, the first at {list(pattern.first_bad or ())}",
        pattern,
    )


def unpack24(
    values: Packed24 | Array,
    index: Array | None = None,
    cin: int | None = None,
    axis: int = 1,
    *,
    blocks: int = 1,
    zero_point: int = 0,
    negative_zeros: Array | None = None,
) -> Array:
    """The dense weight of a 2:4 storage in any documented style.

    Args:
        values: what `pack24` returned; or the values [*rest, padded / 2] with the other arguments as in
            `Packed24`.
        index: uint8 or int8 [*rest, padded / 8].
        cin: true length of the packed axis; by default the padded length.
        axis: the axis of the weight along which it was packed.
        blocks: see `Packed24`.
        zero_point: see `Packed24`.
        negative_zeros: see `Packed24`.

    Returns:
        The weight, in the dtype of `values`.

    Raises:
        ConversionError: shapes that do not fit each other, or an index that holds the value 3.
    """
    if isinstance(values, Packed24):
        packed = values
    else:
        if index is None:
            raise ConversionError("index is missing: unpack24 takes what pack24 returned, or values and index")
        index = np.asarray(index)
        if index.dtype == np.int8:
            index = index.view(np.uint8)
        if index.dtype != np.uint8:
            raise ConversionError(f"index has type {index.dtype}; allowed: uint8, int8")
        true = 8 * index.shape[-1] if cin is None and index.ndim else cin
        packed = Packed24(np.asarray(values), index, int(true or 0), axis, blocks, "", zero_point, negative_zeros)
    return _unpack(packed)


def _unpack(packed: Packed24) -> Array:
    values, index, cin = packed.values, packed.index, packed.cin
    padded = 8 * index.shape[-1] if index.ndim else 0
    if index.ndim == 0 or values.shape != (*index.shape[:-1], padded // 2) or not padded - 8 < cin <= padded:
        raise ConversionError(
            f"values of shape {list(values.shape)}, index of shape {list(index.shape)} and {cin} input channels "
            "do not fit: each row of n index bytes needs 4 n values and 8 n - 7 to 8 n channels"
        )
    zero = zero_of(values.dtype, packed.zero_point)
    dense = np.empty(packed.shape, values.dtype)
    if not dense.size:
        return dense
    axis = _positive_axis(packed.axis, dense.ndim)
    moved = _moved(dense, axis, packed.blocks)
    if moved.shape[:-1] != index.shape[:-1]:
        raise ConversionError(f"index of shape {list(index.shape)} does not fit {packed.blocks} blocks on axis {axis}")
    slots = np.ascontiguousarray(values).view(zero.bits).reshape(-1, padded // 2)
    bytes_ = np.ascontiguousarray(index).reshape(-1, padded // 8)
    signs = packed.negative_zeros
    if signs is not None:
        if signs.dtype != np.uint8 or signs.shape != index.shape:
            raise ConversionError(
                f"negative_zeros of type {signs.dtype}, shape {list(signs.shape)}; the index needs uint8 and "
                f"{list(index.shape)}"
            )
        signs = np.ascontiguousarray(signs).reshape(bytes_.shape)
    for where, rows_at in chunks(moved):
        rows = _decode(slots[rows_at].reshape(-1), bytes_[rows_at].reshape(-1), zero, packed)
        if signs is not None and zero.magnitude is not None:
            flags = np.unpackbits(signs[rows_at].reshape(-1), bitorder="little").astype(bool)
            rows[flags] = zero.magnitude + 1
        piece = rows.view(values.dtype).reshape(-1, padded)[:, :cin]
        copy_blocks(piece.reshape(moved[where].shape), moved[where])
    return dense


# For each index byte: the four elements its slots point at, and whether they ascend inside both groups.
_POSITIONS = np.array(
    [
        [*(nibble_positions(byte & 15) or (0, 0)), *(4 + p for p in (nibble_positions(byte >> 4) or (0, 0)))]
        for byte in range(256)
    ],
    np.intp,
)
_ORDERED = (_POSITIONS[:, 0] < _POSITIONS[:, 1]) & (_POSITIONS[:, 2] < _POSITIONS[:, 3])
_CORRUPT: npt.NDArray[np.bool_] = np.asarray((source_table() > 4).any(axis=1))
_COVERED = np.zeros((256, 8), np.uint8)
np.put_along_axis(_COVERED, _POSITIONS, 1, axis=1)
_COVERED_WIDE = _COVERED.view(np.uint64).reshape(256)


def _decode(slots: Array, index: npt.NDArray[np.uint8], zero: Zero, packed: Packed24) -> Array:
    """Dense elements, unsigned view, of contiguous slots and index bytes."""
    codes = index.astype(np.intp)
    if _CORRUPT[codes].any():
        place = int(np.argmax(_CORRUPT[codes]))
        raise ConversionError(f"index byte {place} is 0x{int(index[place]):02x}: a 2-bit number is 3; allowed: 0, 1, 2")
    dense = np.full(8 * len(index), zero.value, zero.bits)
    if _ORDERED[codes].all():
        dense[np.flatnonzero(_COVERED_WIDE[codes].view(np.bool_))] = slots
        return dense
    positions = _POSITIONS[codes] + 8 * np.arange(len(index))[:, None]
    first, second = positions[:, ::2].reshape(-1), positions[:, 1::2].reshape(-1)
    slot0, slot1 = slots[::2], slots[1::2]
    is_zero1 = ~non_zero(slot1, zero)
    same = first == second
    dense[second] = slot1
    # Where both slots meet, the one that holds a value wins: adding a zero would change a NaN's bits.
    write = ~same | is_zero1
    dense[first[write]] = slot0[write]
    both = same & ~is_zero1 & non_zero(slot0, zero)
    if both.any():
        with np.errstate(all="ignore"):
            total = slot0[both].view(packed.values.dtype) + slot1[both].view(packed.values.dtype)
            if packed.zero_point:
                total = total - np.array(packed.zero_point).astype(total.dtype)
        dense[first[both]] = total.astype(packed.values.dtype).view(zero.bits)
    return dense
