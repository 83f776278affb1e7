"""Records: attributes, ranges, scores of units, masks; each against values written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from openwork.errors import ConfigError
from openwork.graph.groups import Member, PruneGroup, Role
from openwork.search import get_attribute, make_record, set_attribute
from openwork.search._records import (
    masks_of,
    problem_of_records,
    refresh_gains,
    removed_units,
    spread,
    unit_scores,
)
from openwork.search.testing import chain_of_layers


def positions(*values):
    return np.array(values, dtype=np.int64)


@pytest.fixture
def group():
    """Two units of two channels each, in two blocks, at channels 4..7 of ``a``; ``b`` is tied, ``c`` reads."""
    place = positions(4, 5, 6, 7)
    units = positions(0, 0, 1, 1)
    members = (
        Member("a.weight", 0, Role.PRODUCES, 8, place, units),
        Member("a.bias", 0, Role.CARRIES, 8, place, units),
        Member("b.weight", 0, Role.PRODUCES, 4, positions(0, 1, 2, 3), units),
        Member("norm.weight", 0, Role.CARRIES, 8, place, units),
        Member("c.weight", 1, Role.CONSUMES, 8, place, units),
    )
    return PruneGroup(7, 2, members, positions(0, 0), positions(1))


@pytest.mark.parametrize("value", [1.5, 3, "Conv", [0.5, 1.5], [1, 2, 3]])
def test_attributes(value):
    node = make_record(
        PruneGroup(0, 1, (Member("a.w", 0, Role.PRODUCES, 1, positions(0), positions(0)),), positions(0), positions(1))
    ).producer[0]
    set_attribute(node, "x", "something else")
    set_attribute(node, "x", value)
    assert get_attribute(node, "x") == value
    assert get_attribute(node, "y", 5) == 5


def test_record_of_a_group(group):
    record = make_record(group, {"a": "Conv", "norm": "BatchNormalization"})
    assert [node.name for node in record.producer] == ["a", "b"]
    assert [node.name for node in record.consumer] == ["norm", "c"]
    assert get_attribute(record.producer[0], "type") == "Conv"
    assert [(get_attribute(n, "begin"), get_attribute(n, "end")) for n in record.producer] == [(4, 8), (0, 4)]
    assert get_attribute(record.producer[0], "openwork_group") == 7


def test_scores_of_units(group):
    record = make_record(group)
    set_attribute(record.producer[0], "sensitivity", [1.0, 2.0, 3.0, 4.0])
    assert unit_scores(record, group).tolist() == [3.0, 7.0]
    set_attribute(record.producer[0], "sensitivity", spread(group, np.array([3.0, 7.0])))
    assert unit_scores(record, group).tolist() == [3.0, 7.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "layer 'a' was not set"),
        ([1.0, 2.0], "layer 'a' has 2 values; 4 are needed, one for each channel from 4 to 7"),
        ([1.0, np.nan, 1.0, 1.0], "layer 'a', channel 5, is nan"),
    ],
)
def test_bad_sensitivities(group, values, message):
    record = make_record(group)
    if values is not None:
        set_attribute(record.producer[0], "sensitivity", values)
    with pytest.raises(ConfigError, match=message):
        unit_scores(record, group)


def test_masks_and_back(group):
    record = make_record(group)
    masks = masks_of([(record, group, positions(1))], {"a": {"ori_cout": 8}, "b": {"ori_cout": 4}})
    assert masks == {"a": [1, 1, 1, 1, 1, 1, 0, 0], "b": [1, 1, 0, 0]}
    assert removed_units(record, group, masks).tolist() == [1]


def test_mask_that_breaks_a_unit_or_a_block(group):
    record = make_record(group)
    assert removed_units(record, group, {"a": [1, 1, 1, 1, 0, 1, 0, 0]}).tolist() == [1]
    four = Member("a.weight", 0, Role.PRODUCES, 4, positions(0, 1, 2, 3), positions(0, 1, 2, 3))
    blocked = PruneGroup(0, 4, (four,), positions(0, 0, 1, 1), positions(1, 1))
    assert removed_units(make_record(blocked), blocked, {"a": [0, 0, 0, 1]}).tolist() == [0, 2]
    assert removed_units(make_record(blocked), blocked, {"a": [0, 0, 1, 1]}).tolist() == []


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({}, "no channels for layer 'a'"),
        ({"a": [1, 0]}, "needs a list of 0 and 1 for its 8 channels, got 2 values"),
        ({"a": [2] * 8}, "needs a list of 0 and 1"),
    ],
)
def test_bad_masks(group, masks, message):
    with pytest.raises(ConfigError, match=message):
        removed_units(make_record(group), group, masks)


def test_gains_and_problem():
    info, records = chain_of_layers([8, 16])
    refresh_gains(info, records)
    expected = info["conv0"]["bitops"] / 8 + info["conv1"]["bitops"] / 8
    assert get_attribute(records[0].producer[0], "bitops") == pytest.approx(expected, rel=1e-6)
    problem = problem_of_records(info, records, (2.0, False, 1.0))
    assert problem.full_cost == pytest.approx(sum(layer["bitops"] for layer in info.values()))
    state = problem.cost.state(problem.full)
    assert state.gain(0, 7) == pytest.approx(expected)
