"""The counting table, as AMCT counts, and the properties that hold for any numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openwork.config import kept_channels, ratio_of
from openwork.errors import ConfigError

# (channels, blocks) -> kept for ratios .3, .5, .9, plain and aligned to 16
TABLE = [
    (5, 1, (3, 3, 1), None),
    (10, 1, (7, 5, 1), None),
    (20, 1, (14, 10, 2), (16, 16, 16)),
    (24, 1, (17, 12, 2), (24, 16, 16)),
    (33, 1, (23, 17, 3), (32, 32, 16)),
    (48, 1, (34, 24, 5), (48, 32, 16)),
    (48, 3, (33, 24, 3), (48, 30, 15)),
    (36, 6, (24, 18, 6), None),
]


@pytest.mark.parametrize(("total", "blocks", "plain", "aligned"), TABLE)
def test_table(total: int, blocks: int, plain: tuple[int, ...], aligned: tuple[int, ...] | None) -> None:
    ratios = (0.3, 0.5, 0.9)
    assert tuple(kept_channels(total, ratio, blocks=blocks) for ratio in ratios) == plain
    if aligned:
        assert tuple(kept_channels(total, ratio, True, blocks) for ratio in ratios) == aligned


def test_a_quarter_of_twenty() -> None:
    assert kept_channels(20, 0.25) == 15
    assert kept_channels(20, 0.25, aligned=True) == 16


def test_alignment_holds_where_rounding_leaves_nothing() -> None:
    assert kept_channels(20, 0.99) == 1
    assert kept_channels(20, 0.99, aligned=True) == 16
    assert kept_channels(64, 0.999, aligned=True, blocks=32) == 32


def test_round_to_any_multiple() -> None:
    assert kept_channels(100, 0.5, aligned=True, multiple=8) == 56
    assert kept_channels(100, 0.5, aligned=True, multiple=1) == 50
    assert kept_channels(10, 0.5, aligned=True, multiple=64) == 10


@given(
    blocks=st.integers(1, 12),
    per_block=st.integers(1, 300),
    ratio=st.floats(0, 1, exclude_max=True),
    aligned=st.booleans(),
    multiple=st.integers(1, 40),
)
def test_result_is_always_usable(blocks: int, per_block: int, ratio: float, aligned: bool, multiple: int) -> None:
    total = blocks * per_block
    kept = kept_channels(total, ratio, aligned, blocks, multiple)
    assert blocks <= kept <= total
    assert kept % blocks == 0
    wanted = Fraction(total) - Fraction(total) * Fraction(ratio)
    if not aligned:
        assert abs(kept - wanted) <= Fraction(1, 2) + blocks
    elif blocks == 1:
        assert kept == total or kept % multiple == 0
        assert kept >= min(total, wanted - Fraction(1, 2))


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 2.0, float("nan"), float("inf")])
def test_ratio_out_of_range(ratio: float) -> None:
    with pytest.raises(ConfigError, match="at least 0 and less than 1"):
        kept_channels(10, ratio)


def test_blocks_must_divide() -> None:
    with pytest.raises(ConfigError, match="must divide the 10 channels"):
        kept_channels(10, 0.5, blocks=3)


@given(st.integers(1, 20000).flatmap(lambda total: st.tuples(st.just(total), st.integers(1, total))))
def test_written_ratio_gives_the_count_back(pair: tuple[int, int]) -> None:
    total, kept = pair
    ratio = ratio_of(total, kept)
    assert kept_channels(total, ratio) == kept
    # The field is a float32, and AMCT computes with what it reads from it.
    assert kept_channels(total, float(np.float32(ratio))) == kept
    assert (ratio > 0) == (kept < total)
