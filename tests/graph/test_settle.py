"""Units, groups, blocks and steps of label stores built by hand; the answers follow by reasoning."""

from __future__ import annotations

import numpy as np

from openwork.graph.groups import Role
from openwork.graph.labels import LabelMap, LabelStore
from openwork.graph.settle import settle


def produced(store: LabelStore, name: str, size: int) -> np.ndarray:
    """Labels of the output axis of a weight."""
    labels = store.parameter(name, (size, 1)).entries[0].labels
    store.mark(labels, Role.PRODUCES)
    return labels


def test_tied_positions_are_one_unit() -> None:
    store = LabelStore()
    a, b = produced(store, "a.weight", 4), produced(store, "b.weight", 4)
    store.unify(a, b[::-1])
    (group,) = settle(store).groups
    assert group.units == 4
    assert [m.parameter for m in group.members] == ["a.weight", "b.weight"]
    first, second = group.members
    assert first.units.tolist() == second.units.tolist()[::-1]


def test_freezing_spreads_and_names_the_reason() -> None:
    store = LabelStore()
    a, b = produced(store, "a.weight", 3), produced(store, "b.weight", 3)
    store.unify(a, b)
    store.location = "op in block"
    store.freeze(b, "seen outside")
    settled = settle(store)
    assert settled.groups == ()
    (frozen,) = settled.frozen
    assert frozen.reason == "seen outside (op in block)"
    assert {name for name, _, _ in frozen.members} == {"a.weight", "b.weight"}


def test_a_group_needs_a_weight_that_produces_it() -> None:
    store = LabelStore()
    store.parameter("scale", (5,))
    assert settle(store).groups == ()


def test_equal_parts_become_blocks() -> None:
    store = LabelStore()
    store.rectangular(produced(store, "a.weight", 12).reshape(3, 4))
    (group,) = settle(store).groups
    assert group.blocks == 3
    assert group.steps.tolist() == [1, 1, 1]
    assert np.bincount(group.block_of).tolist() == [4, 4, 4]


def test_nested_parts_use_the_finer_blocks() -> None:
    store = LabelStore()
    labels = produced(store, "a.weight", 16)
    store.rectangular(labels.reshape(2, 8))
    store.rectangular(labels.reshape(4, 4))
    (group,) = settle(store).groups
    assert group.blocks == 4
    assert [sorted(np.flatnonzero(group.block_of == b).tolist()) for b in range(4)] == [
        list(range(4 * b, 4 * b + 4)) for b in group.block_of[[0, 4, 8, 12]].argsort()
    ]


def test_two_weights_that_must_lose_the_same_number_are_one_group() -> None:
    store = LabelStore()
    a, b = produced(store, "a.weight", 6), produced(store, "b.weight", 6)
    store.rectangular(np.stack([a, b]))
    (group,) = settle(store).groups
    assert group.units == 12
    assert group.blocks == 2
    assert {m.parameter for m in group.members} == {"a.weight", "b.weight"}


def test_rows_of_larger_units_take_steps() -> None:
    """A stream of 12 channels as wide as 3 heads of 4: one head goes with four channels."""
    store = LabelStore()
    stream = produced(store, "stream.weight", 12)
    heads = produced(store, "heads.weight", 12)
    rows = heads.reshape(3, 4)
    store.unify(rows, rows[:, :1])
    store.rectangular(np.stack([stream, heads]))
    (group,) = settle(store).groups
    assert group.units == 15
    assert sorted(group.steps.tolist()) == [1, 4]
    assert group.most_steps == 2  # at least one head stays
    step_of = dict(zip(np.bincount(group.block_of).tolist(), group.steps.tolist(), strict=True))
    assert step_of == {12: 4, 3: 1}


def test_aligned_axes_take_longer_steps() -> None:
    """Rows of multiples of 8: of single channels go 8 at a time, of heads of 4 channels two."""
    store = LabelStore()
    single, heads = produced(store, "single.weight", 32), produced(store, "heads.weight", 32)
    other = produced(store, "other.weight", 6)
    rows = heads.reshape(8, 4)
    store.unify(rows, rows[:, :1])
    store.multiple(single, 8)
    store.multiple(heads, 8)
    store.multiple(other, 1)
    steps = {group.members[0].parameter: group.steps.tolist() for group in settle(store).groups}
    assert steps == {"single.weight": [8], "heads.weight": [2], "other.weight": [1]}


def test_aligned_rows_of_tied_blocks() -> None:
    """As above, a stream of 12 channels and 3 heads of 4, the stream aligned to 8: two heads go with eight channels."""
    store = LabelStore()
    stream, heads = produced(store, "stream.weight", 12), produced(store, "heads.weight", 12)
    rows = heads.reshape(3, 4)
    store.unify(rows, rows[:, :1])
    store.rectangular(np.stack([stream, heads]))
    store.multiple(stream, 8)
    (group,) = settle(store).groups
    assert sorted(group.steps.tolist()) == [2, 8]
    assert group.most_steps == 1


def test_whole_rows_may_go_only_where_allowed() -> None:
    for whole in (True, False):
        store = LabelStore()
        rows = produced(store, "a.weight", 12).reshape(3, 4)
        store.unify(rows, rows[:, :1])
        store.rectangular(rows, whole_rows=whole)
        settled = settle(store)
        if whole:
            assert settled.groups[0].units == 3
        else:
            assert settled.groups == ()
            assert "empty" in settled.frozen[0].reason


def test_a_frozen_part_holds_the_others() -> None:
    store = LabelStore()
    labels = produced(store, "a.weight", 8)
    store.freeze(labels[:4], "held")
    store.rectangular(labels.reshape(2, 4))
    settled = settle(store)
    assert settled.groups == ()
    assert any("cannot shrink" in frozen.reason for frozen in settled.frozen)


def test_dead_labels_follow_units() -> None:
    store = LabelStore()
    a = store.parameter("a.weight", (4, 3))
    b = produced(store, "b.weight", 4)
    store.unify(a.entries[0].labels, b)
    settled = settle(store)
    dead = settled.dead_labels({0: np.array([1, 3])})
    assert dead[a.entries[0].labels].tolist() == [False, True, False, True]
    assert not dead[a.entries[1].labels].any()
    assert isinstance(a, LabelMap)
