"""Slicing, splitting, selecting, gathering: part of an axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork.graph.labels import Entry, LabelMap, LabelStore
from openwork.graph.operators.pointwise import pin_axes

__all__ = ["embedding", "select", "slice_axis", "split"]


def _replace(entry: Entry, labels: np.ndarray) -> Entry:
    return Entry(entry.axes, labels, entry.order, entry.fresh)


def slice_axis(store: LabelStore, x: LabelMap, axis: int, start: int, stop: int, step: int = 1) -> LabelMap:
    """Positions start, start + step, .. below stop of an axis."""
    size = x.shape[axis]
    length = max(0, -(-(stop - start) // step))
    shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
    if length == size:
        return LabelMap(shape, x.entries, x.weight)
    entry = x.entry(axis)
    if entry is None:
        return LabelMap(shape, x.entries, x.weight)
    if step != 1:
        return pin_axes(store, x, [axis], "every other channel is taken").with_shape(shape)
    if len(entry.axes) == 1 and not entry.fresh and size % length == 0 and start % length == 0:
        # Equal parts are written as a half, a third, ..: they stay equal.
        store.rectangular(entry.labels.reshape(-1, length))
    part = np.take(entry.labels, np.arange(start, stop), axis=entry.axes.index(axis))
    entries = tuple(_replace(other, part) if other is entry else other for other in x.entries)
    if length == 1:
        return pin_axes(store, LabelMap(shape, entries, x.weight), [axis], "a single channel is taken")
    return LabelMap(shape, entries, x.weight)


def split(store: LabelStore, x: LabelMap, axis: int, sizes: Sequence[int]) -> list[LabelMap]:
    """Consecutive parts of an axis. Equal parts must lose the same number."""
    entry = x.entry(axis)
    if entry is not None and len(entry.axes) == 1 and len(sizes) > 1 and len(set(sizes)) == 1 and sizes[0] > 1:
        store.rectangular(entry.labels.reshape(len(sizes), sizes[0]))
    results = []
    start = 0
    for size in sizes:
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        if entry is None:
            results.append(LabelMap(shape, x.entries, x.weight))
        else:
            part = np.take(entry.labels, np.arange(start, start + size), axis=entry.axes.index(axis))
            entries = tuple(_replace(other, part) if other is entry else other for other in x.entries)
            piece = LabelMap(shape, entries, x.weight)
            results.append(pin_axes(store, piece, [axis], "a single channel is split off") if size == 1 else piece)
        start += size
    return results


def select(store: LabelStore, x: LabelMap, axis: int, index: int) -> LabelMap:
    """One position of an axis; the axis is gone."""
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    places = {a: a - (a > axis) for a in range(len(x.shape))}
    entries = []
    for entry in x.entries:
        if axis not in entry.axes:
            entries.append(entry.moved(places))
            continue
        if len(entry.axes) == 1:
            if not entry.fresh:
                store.freeze(entry.labels, f"position {index} of a channel axis is picked")
            continue
        place = entry.axes.index(axis)
        axes = tuple(places[a] for a in entry.axes if a != axis)
        order = tuple(places[a] for a in entry.order if a != axis)
        entries.append(Entry(axes, np.take(entry.labels, index, axis=place), order, entry.fresh))
    return LabelMap(shape, tuple(entries), x.weight)


def embedding(store: LabelStore, weight: LabelMap, index_shape: Sequence[int]) -> LabelMap:
    """Rows of a table [rows, width] picked by data: the rows stay, the width goes to the result."""
    weight = pin_axes(store, weight, [0], "rows are picked by data")
    last = len(index_shape)
    shape = (*index_shape, *weight.shape[1:])
    entries = tuple(entry.moved({axis: axis - 1 + last for axis in entry.axes}) for entry in weight.entries)
    return LabelMap(shape, entries)
