"""A prune plan in a record: all of it comes back, AMCT's nodes are right, damage is noticed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openwork.errors import RecordError
from openwork.record import (
    ChannelPruneRecord,
    LayerKind,
    PlanCut,
    PlanGroup,
    PlanRepair,
    PruneNode,
    Record,
    decode_plan,
    dump_record,
    encode_plan,
    parse_record_text,
)

KINDS = {
    "a": LayerKind("Conv"),
    "b": LayerKind("Conv", 2),
    "bn": LayerKind("BatchNormalization"),
    "dw": LayerKind("Conv", 12),
    "c": LayerKind("Conv"),
    "fc": LayerKind("Gemm"),
}


def cut(parameter: str, axis: int, role: str, size: int, removed: list[int], **more: int) -> PlanCut:
    return PlanCut(parameter, axis, role, size, more.pop("blocks", 1), np.array(removed), **more)


GONE = [0, 2, 3, 7, 10, 11]
SHIFTED = [8, 10, 11, 15, 18, 19]
# a (8 channels) and b (12, two groups) concatenated into c; b's channels also pass a norm and a depthwise conv.
GROUPS = [
    PlanGroup(
        0,
        8,
        6,
        [
            cut("a.weight", 0, "produces", 8, [1, 4]),
            cut("a.bias", 0, "carries", 8, [1, 4]),
            cut("c.weight", 1, "consumes", 20, [1, 4], begin=0, end=8),
        ],
    ),
    PlanGroup(
        3,
        12,
        6,
        [
            cut("b.weight", 0, "produces", 12, GONE),
            cut("bn.weight", 0, "carries", 12, GONE),
            cut("bn.running_mean", 0, "carries", 12, GONE),
            cut("dw.weight", 0, "carries", 12, GONE),
            cut("scale", 2, "carries", 12, GONE),
            cut("c.weight", 1, "consumes", 20, SHIFTED, begin=8, end=20),
        ],
        blocks=2,
    ),
]
REPAIRS = [
    PlanRepair("attn", "num_heads", 12, 6),
    PlanRepair("", "shape", (12, [4, 4.5], None), (6, [4, 4.5], None)),
    PlanRepair("norm", "normalized_shape", (True, "x"), ()),
]


def flat(group: PlanGroup) -> tuple:
    rows = []
    for item in group.cuts:
        item = item if isinstance(item, PlanCut) else PlanCut(*item)
        end = item.size if item.end is None else item.end
        positions = tuple(np.asarray(item.removed).tolist())
        rows.append((item.parameter, item.axis, item.role, item.size, item.blocks, positions, item.begin, end))
    return (group.index, group.units_before, group.units_after, group.blocks, rows)


def travel(records: list[ChannelPruneRecord]) -> list[ChannelPruneRecord]:
    return parse_record_text(dump_record(Record(channels=records))).channels


def test_everything_comes_back_from_a_file() -> None:
    decoded = decode_plan(travel(encode_plan(GROUPS, REPAIRS, KINDS)))
    assert decoded is not None
    groups, repairs = decoded
    assert [flat(group) for group in groups] == [flat(group) for group in GROUPS]
    assert repairs == REPAIRS
    assert isinstance(repairs[1].old, tuple)
    assert all(item.removed.dtype == np.int64 for group in groups for item in group.cuts)


def test_amct_sees_its_own_nodes() -> None:
    first, second = travel(encode_plan(GROUPS, REPAIRS, KINDS))
    bare = [
        [replace(item, extra={}) for item in side]
        for side in (first.producers, first.consumers, second.producers, second.consumers)
    ]
    assert bare == [
        [PruneNode("a", "Conv", 0, 8, [1, 4])],
        [PruneNode("c", "Conv", 0, 8, [1, 4])],
        [PruneNode("b", "Conv", 0, 12, GONE, group=2, prune_group=2)],
        [
            PruneNode("bn", "BatchNormalization", 0, 12, GONE),
            PruneNode("dw", "Conv", 0, 12, GONE, group=12),
            PruneNode("c", "Conv", 8, 20, SHIFTED),
        ],
    ]


def test_plain_dicts_and_tuples_will_do() -> None:
    group = {"index": 1, "units_before": 4, "units_after": 3}
    cuts = [("a.weight", 0, "produces", 4, 1, np.array([2]))]
    records = encode_plan([{**group, "cuts": cuts}], [("m", "size", 4, 3)], KINDS)
    decoded = decode_plan(records)
    assert decoded is not None
    assert flat(decoded[0][0]) == (1, 4, 3, 1, [("a.weight", 0, "produces", 4, 1, (2,), 0, 4)])
    assert decoded[1] == [PlanRepair("m", "size", 4, 3)]


def test_groups_that_amct_does_not_know_travel_too() -> None:
    only_norm = PlanGroup(0, 4, 3, [cut("bn.weight", 0, "carries", 4, [1])])
    nothing = PlanGroup(1, 4, 3, [cut("x.y", 2, "produces", 4, [1]), cut("pos", 2, "carries", 4, [1])])
    root = PlanGroup(2, 4, 3, [cut("pos", 2, "carries", 4, [3])])
    records = encode_plan([only_norm, nothing, root], [], KINDS)
    assert [record.producers[0].name for record in records] == ["bn", "x", "pos"]
    decoded = decode_plan(travel(records))
    assert decoded is not None
    assert [flat(group) for group in decoded[0]] == [flat(group) for group in (only_norm, nothing, root)]


def test_a_record_of_amct_has_no_plan() -> None:
    assert decode_plan([ChannelPruneRecord((PruneNode("a", "Conv", 0, 4, [1]),))]) is None
    assert decode_plan([]) is None


def test_an_empty_plan() -> None:
    assert encode_plan([], [], KINDS) == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(
    VALUES,
    VALUES,
    st.lists(st.tuples(st.integers(2, 40), st.integers(1, 4), st.integers(0, 99)), min_size=1, max_size=4),
)
def test_any_plan(old: object, new: object, sizes: list[tuple[int, int, int]]) -> None:
    groups = []
    for index, (size, blocks, seed) in enumerate(sizes):
        random = np.random.default_rng(seed)
        removed = np.flatnonzero(random.random(size * blocks) < 0.5)
        cuts = [PlanCut("w", axis, "consumes", size * blocks, blocks, removed) for axis in range(3)]
        if len(removed) < size * blocks:
            groups.append(PlanGroup(index, size, 1, cuts, blocks))
    repairs = [PlanRepair("m", "x", old, new)] if groups else []
    decoded = decode_plan(travel(encode_plan(groups, repairs, {})))
    assert (decoded is None) == (not groups)
    if decoded:
        assert [flat(group) for group in decoded[0]] == [flat(group) for group in groups]
        assert decoded[1] == repairs


def edited(change: tuple[str, str], number: int = 0, repairs: bool = False) -> list[ChannelPruneRecord]:
    records = encode_plan(GROUPS, REPAIRS, KINDS)
    name = "openwork_repairs" if repairs else "openwork_plan"
    text = str(records[number].producers[0].extra[name])
    assert change[0] in text
    records[number] = records[number].with_extra({name: text.replace(*change)})
    return records


DAMAGE = [
    (("{", ""), "is not JSON"),
    (('"version":1', '"version":2'), "version is 2; this openwork reads 1"),
    (('"after":6', '"after":0'), "sizes are impossible"),
    (('"after":6', '"after":"6"'), "after: '6' found where int is needed"),
    (('"removed":["1,4"]', '"removed":["4,1"]'), "'4,1' is not strictly ascending"),
    (('"removed":["1,4"]', '"removed":["1,44"]'), "position 44 is not below 8"),
    (('"removed":["1,4"]', '"removed":[]'), "set 0 of positions does not exist"),
    (('"produces",8', '"produce",8'), "role is 'produce'; allowed: produces, consumes, carries"),
    (('"produces",8,1', '"produces",8,3'), "blocks is 3; it must divide 8"),
    (('"a.weight",0', '"a.weight",-1'), "axis -1, range 0 to 8 do not fit size 8"),
    (('"a.weight",0', '"a.weight"'), "7 values found where 8 are needed"),
    (('"a.weight",0', '"a.weight",true'), "'True' found where int is needed"),
    (('"removed":["1,4"]', '"removed":["1,5"]'), "prune_index of 'a' differs from it"),
]


@pytest.mark.parametrize(("change", "words"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_damage(change: tuple[str, str], words: str) -> None:
    with pytest.raises(RecordError) as caught:
        decode_plan(edited(change), "net.txt")
    assert words in str(caught.value)
    assert str(caught.value).startswith("net.txt: prune_record[0].producer[0] 'a': openwork_plan")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[", ""), "is not JSON"),
        (('"attn",', ""), "3 values found where 4"),
        (('"tuple"', '"set"'), "no attribute's"),
    ],
)
def test_damaged_repairs(change: tuple[str, str], words: str) -> None:
    with pytest.raises(RecordError, match=words):
        decode_plan(edited(change, repairs=True))


def test_a_group_is_missing() -> None:
    with pytest.raises(RecordError, match="the plan has 2 groups, the record 1; it is not whole"):
        decode_plan(encode_plan(GROUPS, REPAIRS, KINDS)[:1])


def test_a_group_without_plan_among_others() -> None:
    records = encode_plan(GROUPS, REPAIRS, KINDS)
    records[1] = ChannelPruneRecord(tuple(replace(item, extra={}) for item in records[1].producers))
    with pytest.raises(RecordError, match=r"prune_record\[1\].* is missing; it is required in every group"):
        decode_plan(records)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (cut("a.weight", 0, "produces", 4, [4]), "positions 4 to 4 are not in 0 to 3"),
        (cut("a.weight", 0, "produces", 4, [2, 1]), "strictly ascending"),
        (cut("a.weight", 0, "makes", 4, [1]), "role is 'makes'"),
        (cut("a.weight", 0, "produces", 4, [1], begin=2), "positions 1 to 1 are not in 2 to 3"),
        (cut("a.weight", 0, "produces", 4, [1], end=5), "do not fit size 4"),
    ],
)
def test_impossible_cuts_are_not_written(wrong: PlanCut, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        encode_plan([PlanGroup(0, 4, 3, [wrong])], [], KINDS)


def test_values_that_cannot_be_written() -> None:
    with pytest.raises(RecordError, match="a repaired attribute holds a set"):
        encode_plan(GROUPS, [PlanRepair("m", "x", {1}, 2)], KINDS)


def test_equal_positions_are_stored_once() -> None:
    size, count = 100_000, 50
    removed = np.arange(0, size, 2)
    cuts = [PlanCut(f"layer{i}.weight", 0, "carries", size, 1, removed) for i in range(count)]
    (record,) = encode_plan([PlanGroup(0, size, size // 2, cuts)], [], {})
    text = str(record.producers[0].extra["openwork_plan"])
    assert len(json.loads(text)["removed"]) == 1
    assert len(text) < 8 * size
    decoded = decode_plan(travel([record]))
    assert decoded is not None
    assert all(np.array_equal(item.removed, removed) for item in decoded[0][0].cuts)


def test_layers_may_have_other_names_than_their_parameters() -> None:
    group = PlanGroup(
        0,
        4,
        3,
        [
            PlanCut("w", 3, "produces", 4, 1, np.array([2]), 0, 4, "a/b.c/Conv2D"),
            PlanCut("v", 2, "consumes", 4, 1, np.array([2]), 0, 4, "MatMul"),
        ],
    )
    kinds = {"a/b.c/Conv2D": LayerKind("Conv2D"), "MatMul": LayerKind("MatMul")}
    text = dump_record(Record(channels=encode_plan([group], [], kinds)))
    (record,) = parse_record_text(text).channels
    assert [node.name for node in record.nodes] == ["a/b.c/Conv2D", "MatMul"]
    decoded = decode_plan([record])
    assert decoded is not None
    assert [(c.parameter, c.layer) for c in decoded[0][0].cuts] == [("w", "a/b.c/Conv2D"), ("v", "MatMul")]  # type: ignore[union-attr]
