"""Reductions, softmax, windows: an axis is mixed along itself.

A reduced axis takes its labels away with it. In a joint entry (rows, columns) every row is mixed as a whole,
so the entry collapses along the axis: what stays are units on the other axes.
"""

from __future__ import annotations

from collections.abc import Sequence

from openwork.graph.labels import Entry, LabelMap, LabelStore
from openwork.graph.operators.pointwise import pin_axes, separate

__all__ = ["mixed_along", "reduce", "window"]


def mixed_along(store: LabelStore, x: LabelMap, axes: Sequence[int]) -> LabelMap:
    """Softmax, normalisation: the axes keep their labels, statistics are taken over what survives."""
    return separate(store, x, axes, "mixed along")


def reduce(store: LabelStore, x: LabelMap, axes: Sequence[int], keepdim: bool) -> LabelMap:
    """Sum, mean, norm, maximum .. over axes."""
    axes = sorted(axes)
    entries: list[Entry] = []
    for entry in x.entries:
        inside = [axis for axis in entry.axes if axis in axes]
        if len(inside) == len(entry.axes):
            if len(inside) > 1:
                store.pin(entry, list(entry.order[1:]), "reduced")
            continue
        kept = store.pin(entry, inside, "reduced")
        if kept is not None:
            entries.append(kept)
    if keepdim:
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
        return LabelMap(shape, tuple(entries), x.weight)
    left = [axis for axis in range(len(x.shape)) if axis not in axes]
    places = {axis: place for place, axis in enumerate(left)}
    return LabelMap(tuple(x.shape[axis] for axis in left), tuple(entry.moved(places) for entry in entries), x.weight)


def window(store: LabelStore, x: LabelMap, axes: Sequence[int], shape: Sequence[int], why: str) -> LabelMap:
    """Pooling, interpolation, rolling, sorting along axes: those keep their length, others their labels."""
    return pin_axes(store, x, axes, why).with_shape(shape)
