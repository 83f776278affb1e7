"""pack24 and unpack24 against a plain reference of the documented format, and against torch's converter."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.sparse import _semi_structured_conversions as oracle

from openwork.errors import ConversionError
from openwork.sparsity.nibbles import pack_nibbles, unpack_nibbles
from openwork.sparsity.nvidia import cutlass_metadata, from_cutlass_metadata, from_nvidia, to_nvidia
from openwork.sparsity.pack24 import Not24Error, Packed24, check24, pack24, packed_shapes, unpack24
from weights24 import random_24

# The table of the documentation: non-zero places -> (idx0, idx1) and which non-zero each slot holds.
PAIRS = {p: (p[0], p[1] - 1) for p in itertools.combinations(range(4), 2)}
CANONICAL = {**PAIRS, (): (0, 0), (0,): (0, 0), (1,): (1, 1), (2,): (2, 2), (3,): (0, 2)}
ATC = {**PAIRS, (): (0, 0), (0,): (0, 0), (1,): (1, 0), (2,): (2, 1), (3,): (0, 2)}
ASCEND_C = {**PAIRS, (): (0, 0), (0,): (0, 0), (1,): (1, 0), (2,): (2, 0), (3,): (0, 2)}
TABLES = {"canonical": CANONICAL, "atc": ATC, "ascendc": ASCEND_C}
VALUES = {
    (): (0, 0),
    (0,): ("a", 0),
    (1,): ("a", 0),
    (2,): ("a", 0),
    (3,): (0, "a"),
    **dict.fromkeys(PAIRS, ("a", "b")),
}

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
INTEGERS = [np.int8, np.uint8, np.int16, np.int32, ml_dtypes.int4, ml_dtypes.uint4]


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def reference_decode(values: np.ndarray, index: np.ndarray, cin: int) -> np.ndarray:
    """The documented decoding, one group after the other, of 2-D values and index."""
    rows = np.zeros((values.shape[0], 2 * values.shape[1]), np.float64)
    for row in range(values.shape[0]):
        for group in range(values.shape[1] // 2):
            nibble = int(index[row, group // 2]) >> (4 * (group % 2)) & 15
            rows[row, 4 * group + (nibble & 3)] += float(values[row, 2 * group])
            rows[row, 4 * group + 1 + (nibble >> 2)] += float(values[row, 2 * group + 1])
    return rows[:, :cin]


@pytest.mark.parametrize("style", TABLES)
@pytest.mark.parametrize("places", CANONICAL)
@pytest.mark.parametrize("second", [False, True])
def test_index_and_values_of_every_pattern(style, places, second):
    group = np.zeros(4, np.int8)
    letters = {"a": 7, "b": -3}
    for place, letter in zip(places, "ab", strict=False):
        group[place] = letters[letter]
    other = np.array([0, 5, 0, 6], np.int8)  # (1, 2)
    weight = np.concatenate([other, group] if second else [group, other])[None]
    packed = pack24(weight, 1, style=style)
    idx0, idx1 = TABLES[style][places]
    nibbles = [idx0 | idx1 << 2, 1 | 2 << 2]
    expected = [letters.get(value, 0) for value in VALUES[places]]
    if second:
        assert packed.index.tolist() == [[nibbles[1] | nibbles[0] << 4]]
        assert packed.values.tolist() == [[5, 6, *expected]]
    else:
        assert packed.index.tolist() == [[nibbles[0] | nibbles[1] << 4]]
        assert packed.values.tolist() == [[*expected, 5, 6]]
    assert (reference_decode(packed.values, packed.index, 8) == weight).all()
    assert (unpack24(packed) == weight).all()


def test_older_manual_page_is_read():
    # idx (2, 0) with (X, 0), and slots out of order: (1, 0) with (X, Y) doubles up as the formula says.
    assert unpack24(np.array([[9, 0, 0, 0]], np.int8), np.array([[2]], np.uint8), 4).tolist() == [[0, 0, 9, 0]]
    assert unpack24(np.array([[9, 1, 0, 0]], np.int8), np.array([[1]], np.uint8), 4).tolist() == [[0, 10, 0, 0]]
    assert unpack24(np.array([[9, 1, 0, 0]], np.int8), np.array([[2]], np.uint8), 4).tolist() == [[0, 1, 9, 0]]


@pytest.mark.parametrize("byte", [0x03, 0x0C, 0x30, 0xC0, 0xFF])
def test_value_three_is_corrupt(byte):
    with pytest.raises(ConversionError, match="2-bit number is 3"):
        unpack24(np.zeros((1, 4), np.float32), np.array([[byte]], np.uint8), 8)


def test_three_non_zeros_are_refused_with_the_place():
    weight = np.zeros((3, 12, 2), np.float32)
    weight[:, ::4] = 1
    weight[1, 8:11, 1] = 1
    weight[2, 0:4, 0] = np.nan
    with pytest.raises(Not24Error, match=r"2 of 18 groups along axis 1 .* first at \[1, 8, 1\]") as caught:
        pack24(weight, 1)
    assert caught.value.pattern.first_bad == (1, 8, 1)
    # In blocks of six, groups start anew: 0..3, 4..5, 6..9, 10..11.
    assert check24(weight, 1, blocks=2).groups == 24
    assert check24(np.array([0, 1, 0, 1, 1, 1], np.int8), 0).qualifies
    assert check24(np.array([0, 1, 1, 0, 1, 1], np.int8), 0, blocks=2).first_bad is None


@pytest.mark.parametrize("dtype", DTYPES + INTEGERS, ids=lambda d: np.dtype(d).name)
def test_round_trip_over_many_weights(dtype):
    """Every dtype, style, axis, ragged lengths and blocks: the bits come back. 1,000 weights per dtype."""
    rng = np.random.default_rng(7)
    floating = not (np.dtype(dtype).kind in "iu" or "int4" in np.dtype(dtype).name)
    for trial in range(1000):
        rank = int(rng.integers(1, 6))
        axis = int(rng.integers(rank))
        blocks = int(rng.choice([1, 1, 1, 2, 3]))
        shape = [int(n) for n in rng.integers(1, 5, rank)]
        shape[axis] = blocks * int(rng.integers(1, 30))
        zero_point = 0 if floating else int(rng.choice([0, 0, 6]))
        weight = random_24(rng, tuple(shape), axis, blocks, dtype, zero_point)
        style = ("canonical", "atc", "ascendc", "torch")[trial % 4]
        pattern = check24(weight, axis, blocks=blocks, zero_point=zero_point)
        assert pattern.qualifies
        assert pattern.zeros == np.count_nonzero(weight.astype(np.float32) == zero_point)
        packed = pack24(weight, axis, style=style, blocks=blocks, zero_point=zero_point)
        assert (packed.values.shape, packed.index.shape) == packed_shapes(weight.shape, axis, blocks)
        assert packed.shape == weight.shape
        assert packed.values.dtype == weight.dtype
        assert packed.cin == weight.shape[axis] // blocks
        back = unpack24(packed)
        assert back.dtype == weight.dtype
        assert bits(back) == bits(weight)
        if style == "canonical":
            assert pattern.hidden_negative_zeros == (packed.negative_zeros is not None)
            assert np.isin(packed.index & 15, [0, 4, 8, 5, 9, 10]).all()
            assert np.isin(packed.index >> 4, [0, 4, 8, 5, 9, 10]).all()


def test_against_the_reference_decoder():
    rng = np.random.default_rng(3)
    for style in ("canonical", "atc", "ascendc", "torch"):
        weight = np.nan_to_num(random_24(rng, (40, 53), 1, 1, np.float32), posinf=4)
        packed = pack24(weight, 1, style=style)
        assert (reference_decode(packed.values, packed.index, packed.cin) == weight).all()


def test_pieces_larger_than_one_chunk():
    rng = np.random.default_rng(5)
    for shape, axis in [
        ((700, 1033), 1),
        ((1033, 700), 0),
        ((3, 300, 517), 1),
        ((2, 300_000), 1),
        ((64, 64, 7, 7), 1),
    ]:
        weight = random_24(rng, shape, axis, 1, np.int16)
        assert bits(unpack24(pack24(weight, axis))) == bits(weight)
        bad = weight.copy()
        end = [n - 1 for n in shape]
        end[axis] = shape[axis] // 4 * 4 - 4
        where = tuple(slice(n, n + 4) if i == axis else n for i, n in enumerate(end))
        bad[where] = 1
        assert check24(bad, axis).first_bad == tuple(end)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_any_bits_either_round_trip_or_are_refused(seed, cin, rows):
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 2**32, (rows, cin), dtype=np.uint32).view(np.float32)
    weight[rng.random(weight.shape) < rng.random()] = 0
    groups = np.pad(weight != 0, ((0, 0), (0, -cin % 4))).reshape(rows, -1, 4).sum(-1)
    if (groups > 2).any():
        with pytest.raises(Not24Error) as caught:
            pack24(weight, 1)
        assert caught.value.pattern.bad_groups == (groups > 2).sum()
    else:
        assert bits(unpack24(pack24(weight, 1))) == bits(weight)


@given(st.binary(min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_index_bytes_either_decode_as_documented_or_are_refused(data):
    index = np.frombuffer(data, np.uint8)[None]
    values = np.random.default_rng(len(data)).integers(-9, 9, (1, 4 * len(data))).astype(np.int8)
    corrupt = any(b >> s & 3 == 3 for b in data for s in (0, 2, 4, 6))
    if corrupt:
        with pytest.raises(ConversionError):
            unpack24(values, index)
    else:
        assert (unpack24(values, index) == reference_decode(values, index, 8 * len(data))).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_metadata_equals_torchs_own_converter(dtype):
    rng = np.random.default_rng(11)
    rows, columns = 64, 256
    name = {torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16, torch.int8: np.int8}[dtype]
    weight = random_24(rng, (rows, columns), 1, 1, np.int8).astype(name)
    raw = torch.from_numpy(weight.view(np.int8 if dtype == torch.int8 else np.int16).copy()).view(dtype)
    sparse, meta = oracle.sparse_semi_structured_from_dense_cutlass(raw)
    packed = pack24(weight, 1, style="torch")
    expected = sparse.view(torch.int8 if dtype == torch.int8 else torch.int16).numpy()
    assert (packed.values.view(expected.dtype) == expected).all()
    ours = cutlass_metadata(packed)
    assert ours.dtype == meta.numpy().dtype
    assert (ours == meta.numpy()).all()
    assert bits(unpack24(from_cutlass_metadata(packed.values, meta.numpy()))) == bits(weight)
    # and torch reads what the canonical style writes
    canonical = pack24(weight, 1)
    dense = oracle.sparse_semi_structured_to_dense_cutlass(
        torch.from_numpy(canonical.values.view(expected.dtype).copy()).view(dtype),
        torch.from_numpy(cutlass_metadata(canonical)),
    )
    assert torch.equal(dense, raw)


def test_nvidia_byte_is_the_canonical_byte_plus_0x44():
    weight = random_24(np.random.default_rng(2), (5, 24, 3), 1, 1, np.float16)
    packed = pack24(weight, 1)
    metadata = to_nvidia(packed)
    assert (metadata.astype(int) == packed.index.astype(int) + 0x44).all()
    for shift in (0, 4):
        assert ((metadata >> shift & 3) < (metadata >> (shift + 2) & 3)).all()
    back = unpack24(from_nvidia(packed.values, metadata, packed.cin))
    assert (back.astype(float) == weight.astype(float))[~np.isnan(weight)].all()
    with pytest.raises(ConversionError, match="must ascend"):
        from_nvidia(packed.values, np.zeros_like(metadata), packed.cin)
    with pytest.raises(ConversionError, match="'atc'"):
        to_nvidia(pack24(weight, 1, style="atc"))


def test_errors():
    weight = np.zeros((4, 8), np.float32)
    with pytest.raises(ConversionError, match="style 'huawei'"):
        pack24(weight, 1, style="huawei")
    with pytest.raises(ConversionError, match="axis 2"):
        pack24(weight, 2)
    with pytest.raises(ConversionError, match="3 equal blocks"):
        pack24(weight, 1, blocks=3)
    with pytest.raises(ConversionError, match="complex64"):
        pack24(weight.astype(np.complex64), 1)
    with pytest.raises(ConversionError, match="scalar"):
        pack24(np.float32(3), 0)
    with pytest.raises(ConversionError, match="do not fit"):
        unpack24(Packed24(np.zeros((4, 5), np.int8), np.zeros((4, 1), np.uint8), 8))
    with pytest.raises(ConversionError, match="zero-point 3"):
        pack24(weight, 1, zero_point=3)


def test_empty_weights():
    for shape in [(0, 8), (4, 0), (0,)]:
        weight = np.zeros(shape, np.float32)
        assert unpack24(pack24(weight, len(shape) - 1)).shape == shape


def test_nibbles():
    numbers = np.array([-8, 7, -1, 0, 3], np.int8)
    data = pack_nibbles(numbers)
    assert data.tolist() == [0x78, 0x0F, 0x03]
    assert unpack_nibbles(data, 5, signed=True).tolist() == numbers.tolist()
    assert unpack_nibbles(data, 5, signed=False).tolist() == [8, 7, 15, 0, 3]
    assert pack_nibbles(numbers.astype(ml_dtypes.int4)).tolist() == data.tolist()
