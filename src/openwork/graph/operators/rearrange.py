"""Operators that move, repeat or reverse whole axes; labels move with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork.graph.labels import Entry, LabelMap, LabelStore

__all__ = ["expand", "flip", "permute", "repeat", "repeat_interleave", "squeeze_to"]


def permute(x: LabelMap, axes: Sequence[int]) -> LabelMap:
    """Axis i of the result is axis ``axes[i]`` of `x`."""
    places = {axis: place for place, axis in enumerate(axes)}
    return LabelMap(tuple(x.shape[axis] for axis in axes), tuple(entry.moved(places) for entry in x.entries), x.weight)


def squeeze_to(x: LabelMap, axes: Sequence[int | None], shape: Sequence[int]) -> LabelMap:
    """Axis i of the result is axis ``axes[i]`` of `x`, or a new one of length 1 where None."""
    places = {axis: place for place, axis in enumerate(axes) if axis is not None}
    return LabelMap(tuple(shape), tuple(entry.moved(places) for entry in x.entries), x.weight)


def expand(store: LabelStore, x: LabelMap, shape: Sequence[int]) -> LabelMap:
    """Broadcast to `shape`: an axis grown from length 1 is uniform, so any of its positions may go."""
    shape = tuple(shape)
    shift = len(shape) - len(x.shape)
    entries = [entry.moved({axis: axis + shift for axis in entry.axes}) for entry in x.entries]
    grown = [axis for axis, size in enumerate(shape) if size > 1 and (axis < shift or x.shape[axis - shift] == 1)]
    return LabelMap(shape, (*entries, *store.fresh(shape, grown)), x.weight)


def repeat(store: LabelStore, x: LabelMap, times: Sequence[int]) -> LabelMap:
    """Tile: axis i is repeated ``times[i]`` times as a whole."""
    shift = len(times) - len(x.shape)
    old = (1,) * shift + x.shape
    shape = tuple(size * count for size, count in zip(old, times, strict=True))
    entries = []
    for entry in x.entries:
        moved = entry.moved({axis: axis + shift for axis in entry.axes})
        entries.append(
            Entry(
                moved.axes,
                np.tile(moved.labels, [times[axis] for axis in moved.axes]),
                moved.order,
                moved.fresh,
            )
        )
    grown = [axis for axis, size in enumerate(old) if size == 1 and shape[axis] > 1]
    return LabelMap(shape, (*entries, *store.fresh(shape, grown)), x.weight)


def repeat_interleave(store: LabelStore, x: LabelMap, axis: int, times: int) -> LabelMap:
    """Each position of `axis` is repeated `times` times in place."""
    shape = (*x.shape[:axis], x.shape[axis] * times, *x.shape[axis + 1 :])
    entries = [
        Entry(entry.axes, np.repeat(entry.labels, times, axis=entry.axes.index(axis)), entry.order, entry.fresh)
        if axis in entry.axes
        else entry
        for entry in x.entries
    ]
    grown = [axis] if x.shape[axis] == 1 and times > 1 else []
    return LabelMap(shape, (*entries, *store.fresh(shape, grown)), x.weight)


def flip(x: LabelMap, axes: Sequence[int]) -> LabelMap:
    """Reverse the given axes."""
    entries = [
        Entry(
            entry.axes,
            np.flip(entry.labels, tuple(place for place, axis in enumerate(entry.axes) if axis in axes)),
            entry.order,
            entry.fresh,
        )
        for entry in x.entries
    ]
    return LabelMap(x.shape, tuple(entries), x.weight)
