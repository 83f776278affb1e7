"""Permitted widths against the known table; losses and removed units against sums written out."""

from __future__ import annotations

import numpy as np
import pytest

from openwork.config.counting import kept_channels
from openwork.errors import ConfigError
from openwork.graph.groups import Member, PruneGroup, Role
from openwork.graph.select import removable
from openwork.search import SearchGroup, group_widths, permitted_widths


@pytest.mark.parametrize(
    ("units", "blocks", "align"),
    [(5, 1, 1), (20, 1, 16), (33, 1, 16), (48, 1, 16), (48, 3, 16), (48, 3, 1), (36, 6, 16), (8, 8, 1)],
)
def test_widths_are_those_that_the_pruner_can_keep(units, blocks, align):
    possible = {kept_channels(units, removed / units, align > 1, blocks) for removed in range(units)}
    assert set(permitted_widths(units, blocks, 1, align)) == possible


def test_widths_of_units_with_several_channels():
    assert permitted_widths(12, channels=64, align=16) == tuple(range(12, 0, -1))
    assert permitted_widths(12, channels=4, align=16) == (12, 8, 4)


@pytest.mark.parametrize(("ratio", "least"), [(1.0, 1), (0.5, 10), (0.49, 11), (0.01, 20)])
def test_cap(ratio, least):
    assert permitted_widths(20, max_prune_ratio=ratio) == tuple(range(20, least - 1, -1))


def test_removed_takes_the_lowest_of_each_block():
    scores = np.array([3.0, 1.0, 2.0, 6.0, 6.0, 5.0])
    group = SearchGroup(0, "x", scores, np.array([0, 0, 0, 1, 1, 1]), permitted_widths(6, 2))
    assert group.widths == (6, 4, 2)
    assert group.removed(4).tolist() == [1, 5]
    assert group.removed(2).tolist() == [1, 2, 3, 5]  # the tie of 3 and 4 goes to the lower index
    assert group.losses.tolist() == [0, 6, 14]


def test_evenness_weighs_what_is_left():
    group = SearchGroup(0, "x", np.ones(4), np.zeros(4, int), permitted_widths(4), evenness=2.0)
    expected = np.cumsum([0, 1, (4 / 3) ** 2, 4])
    assert np.allclose(group.losses, expected)


def test_scores_grow_and_are_squared_unit_by_unit():
    """Two blocks of three: what goes in one step is weighed alike, and each score is raised by itself."""
    scores = np.array([3.0, 1.0, 2.0, 6.0, 6.0, 5.0])
    blocks = np.array([0, 0, 0, 1, 1, 1])
    group = SearchGroup(0, "x", scores, blocks, permitted_widths(6, 2), evenness=2.0, power=2.0)
    first = 1.0**2 + 5.0**2
    second = (2.0 * (3 / 2) ** 2) ** 2 + (6.0 * (3 / 2) ** 2) ** 2
    assert np.allclose(group.losses, [0, first, first + second])
    assert group.sensitivities.tolist() == [0, 6, 14]


def test_ranks_say_which_units_go_and_scores_how_many():
    scores = np.array([1.0, 2.0, 3.0, 4.0])
    ranks = np.array([9.0, 1.0, 5.0, 7.0])
    group = SearchGroup(0, "x", scores, np.zeros(4, int), permitted_widths(4), ranks=ranks)
    assert group.losses.tolist() == [0, 1, 3, 6]
    assert [group.removed(width).tolist() for width in group.widths] == [[], [1], [1, 2], [1, 2, 3]]
    assert group.sensitivities.tolist() == [0, 2, 5, 9]  # of the units that really go


def test_scores_below_zero_stay_a_gain():
    group = SearchGroup(0, "x", np.array([-2.0, 1.0, 3.0]), np.zeros(3, int), permitted_widths(3), power=2.0)
    assert group.losses.tolist() == [0, -4, -3]


def test_not_finite_scores_name_the_layer():
    with pytest.raises(ConfigError, match=r"layer 'layer1\.conv': sensitivity of channel 1 is nan"):
        SearchGroup(0, "layer1.conv", np.array([1, np.nan]), np.zeros(2, int), (2, 1))


def test_blocks_that_lose_different_numbers():
    """One step takes one unit of the first block and two of the second, as a head and its share of the stream."""
    members = (
        Member("qkv.weight", 0, Role.PRODUCES, 3, np.arange(3), np.arange(3)),
        Member("patch.weight", 0, Role.PRODUCES, 6, np.arange(6), np.arange(3, 9)),
    )
    source = PruneGroup(0, 9, members, np.array([0] * 3 + [1] * 6), np.array([1, 2]))
    assert group_widths(source) == (9, 6, 3)
    scores = np.array([2.0, 1, 3, 6, 5, 4, 3, 2, 1])
    group = SearchGroup(0, "qkv", scores, source.block_of, group_widths(source), steps=source.steps)
    assert group.removed(6).tolist() == [1, 7, 8]
    assert group.removed(3).tolist() == [0, 1, 5, 6, 7, 8]
    assert group.losses.tolist() == [0, 1 + 2 + 1, 1 + 2 + 1 + 2 + 3 + 4]


@pytest.mark.parametrize(("align", "ratio"), [(1, 1.0), (16, 1.0), (1, 0.5), (16, 0.5)])
@pytest.mark.parametrize("blocks", [1, 3])
def test_widths_of_a_group_agree_with_the_pruner(align, ratio, blocks):
    member = Member("a.weight", 0, Role.PRODUCES, 48, np.arange(48), np.arange(48))
    group = PruneGroup(0, 48, (member,), np.repeat(np.arange(blocks), 48 // blocks), np.ones(blocks, int))
    possible = {48 - blocks * removable(group, removed / 48, align) for removed in range(48)}
    assert set(group_widths(group, align, ratio)) == {width for width in possible if width >= 48 * (1 - ratio)}
