"""Positions as ranges, against NumPy sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openwork.indices import format_ranges, parse_ranges


@given(st.sets(st.integers(0, 60)))
def test_round_trip(positions: set[int]) -> None:
    ordered = sorted(positions)
    text = format_ranges(ordered)
    assert parse_ranges(text, 61).tolist() == ordered
    # Read independently, part by part.
    found: list[int] = []
    for part in filter(None, text.split(",")):
        start, _, end = part.partition("-")
        found += range(int(start), int(end or start) + 1)
    assert found == ordered


def test_millions_are_short_and_exact() -> None:
    positions = np.flatnonzero(np.arange(4_000_000) % 1000 != 7)
    text = format_ranges(positions)
    assert len(text) < 80_000
    assert np.array_equal(parse_ranges(text, 4_000_000), positions)


@pytest.mark.parametrize(
    "text",
    ["5-3", "3,3", "1-4,2", "0-9", "10", "a", "-1", "1,,2", "1-2-3", "1 2", "0-99999999999999999999999", ","],
)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_ranges(text, 9)


@pytest.mark.parametrize("positions", [[1, 1], [2, 1], [-1, 0]])
def test_not_written(positions: list[int]) -> None:
    with pytest.raises(ValueError, match="strictly ascending"):
        format_ranges(positions)
