"""Packing of masks, against a reference that works bit by bit."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from openwork.errors import RecordError
from openwork.record import SelectiveMaskRecord, pack_mask, unpack_mask

SHAPES = npst.array_shapes(min_dims=1, max_dims=4, max_side=9)
MASKS = npst.arrays(np.bool_, SHAPES)


def reference(mask: np.ndarray) -> list[int]:
    """The words by hand: bits to text, text to bytes, bytes to numbers."""
    bits = "".join("1" if kept else "0" for kept in mask.flatten(order="C").tolist())
    bits += "0" * (-len(bits) % 8)
    data = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))
    data += b"\0" * (-len(data) % 8)
    return [struct.unpack("<q", data[i : i + 8])[0] for i in range(0, len(data), 8)]


@given(MASKS)
def test_words(mask: np.ndarray) -> None:
    words = pack_mask(mask)
    assert words.dtype == np.int64
    assert words.tolist() == reference(mask)


@given(MASKS, st.sampled_from(["C", "F"]))
def test_round_trip(mask: np.ndarray, order: str) -> None:
    stored = np.asarray(mask, order=order)  # type: ignore[call-overload]
    assert np.array_equal(unpack_mask(pack_mask(stored), mask.shape), mask)


def test_by_hand() -> None:
    # 1100 1100 -> 0xCC, the lowest byte of the number.
    assert pack_mask([1, 1, 0, 0, 1, 1, 0, 0]).tolist() == [0xCC]
    assert pack_mask([1]).tolist() == [0x80]
    # 64 ones are all bits of the two's complement of -1; the 65th opens a word.
    assert pack_mask(np.ones(65)).tolist() == [-1, 0x80]
    assert pack_mask(np.arange(12) == 11).tolist() == [0x1000]


@given(npst.arrays(np.int8, SHAPES))
def test_anything_but_zero_is_kept(weight: np.ndarray) -> None:
    assert np.array_equal(SelectiveMaskRecord.of("fc", weight).mask(), weight != 0)


def test_wrong_length() -> None:
    with pytest.raises(RecordError, match=r"'fc': selective_mask has 1 integers; shape \(8, 9\) needs 2"):
        SelectiveMaskRecord("fc", (8, 9), np.zeros(1, np.int64))
    with pytest.raises(RecordError, match=r"has 3 integers; shape \(8, 9\) needs 2"):
        SelectiveMaskRecord("fc", (8, 9), np.zeros(3, np.int64))


def test_bits_beyond_the_mask() -> None:
    with pytest.raises(RecordError, match="bits set beyond the 4 weights"):
        SelectiveMaskRecord("fc", (2, 2), np.array([0xF8]))
    assert SelectiveMaskRecord("fc", (2, 2), np.array([0xF0])).mask().all()


@pytest.mark.parametrize("shape", [(), (0,), (4, -1)])
def test_impossible_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(RecordError, match="mask_shape is"):
        SelectiveMaskRecord("fc", shape, np.zeros(1, np.int64))
