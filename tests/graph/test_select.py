"""How many units go and which: COMPAT's counting table through groups, blocks and steps."""

from __future__ import annotations

import numpy as np
import pytest

from openwork.graph.groups import Member, PruneGroup, Role
from openwork.graph.select import balanced, lowest, needed, removable, sparing


def group(units: int, blocks: int = 1, steps: list[int] | None = None, per_unit: int = 1) -> PruneGroup:
    block_of = np.repeat(np.arange(blocks), units // blocks)
    of = np.repeat(np.arange(units), per_unit)
    member = Member("w", 0, Role.PRODUCES, len(of), np.arange(len(of)), of)
    return PruneGroup(0, units, (member,), block_of, np.array(steps or [1] * blocks))


# units, blocks, then kept for ratios .3, .5, .9, and the same rounded up to multiples of 16.
TABLE = [
    (5, 1, (3, 3, 1), (5, 5, 5)),
    (10, 1, (7, 5, 1), (10, 10, 10)),
    (20, 1, (14, 10, 2), (16, 16, 16)),
    (24, 1, (17, 12, 2), (24, 16, 16)),
    (33, 1, (23, 17, 3), (32, 32, 16)),
    (48, 1, (34, 24, 5), (48, 32, 16)),
    (48, 3, (33, 24, 3), (48, 30, 15)),
    (36, 6, (24, 18, 6), None),
]


@pytest.mark.parametrize(("units", "blocks", "plain", "aligned"), TABLE)
def test_counting_table(units: int, blocks: int, plain: tuple[int, ...], aligned: tuple[int, ...] | None) -> None:
    made = group(units, blocks)
    assert tuple(units - blocks * removable(made, ratio) for ratio in (0.3, 0.5, 0.9)) == plain
    if aligned is not None:
        assert tuple(units - blocks * removable(made, ratio, 16) for ratio in (0.3, 0.5, 0.9)) == aligned


def test_quarter_of_twenty() -> None:
    assert 20 - removable(group(20), 0.25) == 15
    assert 20 - removable(group(20), 0.25, 16) == 16


def test_heads_are_rounded_by_their_channels() -> None:
    assert 12 - removable(group(12, per_unit=64), 0.3, 16) == 8  # a head has 64 channels, aligned anyway
    assert 12 - removable(group(12, per_unit=8), 0.3, 16) == 8  # two heads make 16
    assert 12 - removable(group(12, per_unit=4), 0.3, 16) == 8


def test_lowest_go_and_ties_by_lowest_index() -> None:
    scores = np.array([3.0, 1.0, 1.0, 0.0, 2.0, 1.0])
    assert lowest(group(6), scores, 3).tolist() == [1, 2, 3]
    assert lowest(group(6, 2), scores, 1).tolist() == [1, 3]
    assert lowest(group(6), scores, 0).tolist() == []


def test_steps_take_different_numbers_from_blocks() -> None:
    made = PruneGroup(
        0,
        9,
        (Member("w", 0, Role.PRODUCES, 9, np.arange(9), np.arange(9)),),
        np.array([0] * 6 + [1] * 3),
        np.array([2, 1]),
    )
    gone = lowest(made, np.arange(9.0)[::-1], 2)
    assert gone.tolist() == [2, 3, 4, 5, 7, 8]
    assert balanced(made, gone)
    assert not balanced(made, gone[:-1])
    assert made.most_steps == 2


def test_no_parameter_loses_a_whole_axis() -> None:
    whole = Member("w", 0, Role.PRODUCES, 6, np.arange(6), np.arange(6))
    part = Member("piece", 1, Role.CONSUMES, 2, np.arange(2), np.array([0, 1]))
    made = PruneGroup(0, 6, (whole, part), np.zeros(6, dtype=np.int64), np.array([1]))
    scores = np.array([0.0, 0.5, 1, 2, 3, 4])
    assert needed(made, scores).tolist() == [1]
    assert lowest(made, scores, 3).tolist() == [0, 2, 3]
    assert not balanced(made, np.array([0, 1]))


def test_groups_do_not_empty_an_axis_together() -> None:
    """A layer reads positions 0-1 from one group and 2-4 from another; all five would go."""

    def part(index: int, units: int, begin: int) -> PruneGroup:
        own = Member(f"w{index}", 0, Role.PRODUCES, units, np.arange(units), np.arange(units))
        seen = units // 2
        read = Member("reader", 1, Role.CONSUMES, 5, begin + np.arange(seen), np.arange(seen))
        return PruneGroup(index, units, (own, read), np.zeros(units, np.int64), np.ones(1, np.int64))

    groups = [part(3, 4, 0), part(7, 6, 2)]
    both = {3: np.array([0, 1]), 7: np.array([0, 1, 2])}
    assert list(sparing(groups, both)) == [7]
    fewer = {3: np.array([0, 2]), 7: np.array([0, 1, 2])}
    assert {index: units.tolist() for index, units in sparing(groups, fewer).items()} == {3: [0, 2], 7: [0, 1, 2]}
    assert sparing(groups, {3: np.array([], np.int64)}) == {}
