"""Reshape against an element-by-element reference: every element keeps the label it had in memory order."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from openwork.graph.labels import Entry, LabelMap, LabelStore
from openwork.graph.operators import reshape
from openwork.graph.operators.reshape import blocks_of


def elements(tensor: LabelMap) -> np.ndarray:
    """The label of each element; 0 where none. Only for maps with one entry."""
    full = np.zeros(tensor.shape, dtype=np.int64)
    for entry in tensor.entries:
        shape = [size if axis in entry.axes else 1 for axis, size in enumerate(tensor.shape)]
        full = full + entry.labels.reshape(shape)
    return full


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Two shapes of equal product, and a labelled axis of the first."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=2, max_size=5))

    def merged() -> tuple[int, ...]:
        cuts = draw(st.lists(st.booleans(), min_size=len(factors) - 1, max_size=len(factors) - 1))
        shape = [factors[0]]
        for factor, cut in zip(factors[1:], cuts, strict=True):
            shape.append(factor) if cut else shape.__setitem__(-1, shape[-1] * factor)
        return tuple(shape)

    old, new = merged(), merged()
    axes = [axis for axis, size in enumerate(old) if size > 1]
    return old, new, draw(st.sampled_from(axes)) if axes else -1


@given(shapes())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_each_element_keeps_its_label(case: tuple[tuple[int, ...], tuple[int, ...], int]) -> None:
    old, new, axis = case
    store = LabelStore()
    entries = store.fresh(old, [axis]) if axis >= 0 else ()
    tensor = LabelMap(old, entries)
    result = reshape(store, tensor, new)

    assert result.shape == new
    np.testing.assert_array_equal(elements(result), elements(tensor).reshape(new))


@given(shapes())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_blocks_have_equal_products(case: tuple[tuple[int, ...], tuple[int, ...], int]) -> None:
    old, new, _ = case
    blocks = blocks_of(old, new)
    for olds, news in blocks:
        assert math.prod(old[a] for a in olds) == math.prod(new[a] for a in news)
    assert [a for olds, _ in blocks for a in olds] == [a for a, size in enumerate(old) if size != 1]
    assert [a for _, news in blocks for a in news] == [a for a, size in enumerate(new) if size != 1]


def test_shuffle_ties_the_rows() -> None:
    """View (groups, n), transpose, view back: what is first in a row stays beside what is first in the others."""
    store = LabelStore()
    x = LabelMap((8,), store.fresh((8,)))
    split = reshape(store, x, (2, 4))
    (entry,) = split.entries
    turned = LabelMap((4, 2), (entry.moved({0: 1, 1: 0}),))
    merged = reshape(store, turned, (8,))

    (result,) = merged.entries
    assert result.labels.tolist() == np.repeat(x.entries[0].labels[:4], 2).tolist()
    tied = {(int(a), int(b)) for first, second in store.pairs for a, b in zip(first, second, strict=True) if a != b}
    low = int(x.entries[0].labels[0])
    assert {(low + 4 + i, low + i) for i in range(4)} <= tied | {(b, a) for a, b in tied}


def test_heads_may_go_as_a_whole_and_stay_rectangular() -> None:
    store = LabelStore()
    split = reshape(store, LabelMap((2, 12), store.fresh((2, 12), [1])), (2, 3, 4))
    (entry,) = split.entries
    assert entry.axes == (1, 2)
    assert entry.order == (1, 2)
    assert [(labels.shape, whole) for labels, _, whole in store.rectangles] == [((3, 4), True)]


def test_two_channel_axes_in_one_keep_the_larger() -> None:
    store = LabelStore()
    tensor = LabelMap(
        (3, 5),
        (
            Entry((0,), np.array([1, 2, 3]), (0,)),
            Entry((1,), np.array([4, 5, 6, 7, 8]), (1,)),
        ),
    )
    result = reshape(store, tensor, (15,))
    assert result.entries[0].labels.tolist() == [4, 5, 6, 7, 8] * 3
    assert sorted(np.unique(store.frozen[0][0]).tolist()) == [1, 2, 3]
