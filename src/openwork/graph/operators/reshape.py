"""View and reshape: labels follow the memory order.

Old and new shape are factorised into blocks of equal product. Inside a block the label array is broadcast to
the old axes, reshaped to the new ones, and axes along which it is constant are dropped. Flatten before a
linear layer, channel shuffle and head splitting all fall out of this rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork.graph.labels import Entry, LabelMap, LabelStore

__all__ = ["blocks_of", "reshape"]


def blocks_of(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pairs (axes of old, axes of new) of equal product, as fine as possible; axes of length 1 are left out."""
    blocks: list[tuple[list[int], list[int]]] = []
    i = j = 0
    olds = [axis for axis, size in enumerate(old) if size != 1]
    news = [axis for axis, size in enumerate(new) if size != 1]
    while i < len(olds) and j < len(news):
        a, b = [olds[i]], [news[j]]
        left, right = old[olds[i]], new[news[j]]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                a.append(olds[i])
                left *= old[olds[i]]
                i += 1
            else:
                b.append(news[j])
                right *= new[news[j]]
                j += 1
        blocks.append((a, b))
    return blocks


def reshape(store: LabelStore, x: LabelMap, shape: Sequence[int]) -> LabelMap:
    """The map of `x` viewed with another shape of the same number of elements."""
    shape = tuple(shape)
    if shape == x.shape or not x.entries or 0 in shape:
        return LabelMap(shape, x.entries if shape == x.shape else (), x.weight)
    blocks = blocks_of(x.shape, shape)
    places = {olds[0]: news[0] for olds, news in blocks if len(olds) == len(news) == 1}
    results: list[Entry] = []
    for entry in x.entries:
        current: Entry | None = entry
        for old_axes, new_axes in blocks:
            if current is not None and set(old_axes) & set(current.axes) and len(old_axes) + len(new_axes) > 2:
                current = _through_block(store, current, old_axes, new_axes, x.shape, shape)
        if current is not None:
            renamed = {axis: axis - _NEW if axis >= _NEW else places[axis] for axis in current.axes}
            results.append(current.moved(renamed))
    return LabelMap(shape, _disjoint(store, results), x.weight)


_NEW = 1000  # added to axes that are already axes of the new shape


def _through_block(
    store: LabelStore,
    entry: Entry,
    old_axes: list[int],
    new_axes: list[int],
    old: Sequence[int],
    new: Sequence[int],
) -> Entry | None:
    """Carry one entry through one block; its axes there become `_NEW` + axis of the new shape."""
    # Rows that lose different positions may only be merged rows first; otherwise all rows must lose the same.
    current: Entry | None = entry
    while current is not None:
        inside = [axis for axis in current.axes if axis in old_axes]
        wanted = [axis for axis in current.order if axis in inside]
        wrong = next((a for a, b in zip(wanted, inside, strict=True) if a != b), None)
        if wrong is None:
            break
        current = store.collapse(current, wrong)
    if current is None:
        return None
    entry = current
    outside = [axis for axis in entry.axes if axis not in old_axes]
    inside = [axis for axis in entry.axes if axis in old_axes]
    array = entry.labels.transpose(
        [entry.axes.index(axis) for axis in outside] + [entry.axes.index(axis) for axis in inside]
    )
    lead = array.shape[: len(outside)]
    full = array.reshape(lead + tuple(old[axis] if axis in inside else 1 for axis in old_axes))
    full = np.broadcast_to(full, lead + tuple(old[axis] for axis in old_axes))
    full = full.reshape(lead + tuple(new[axis] for axis in new_axes))
    kept_axes: list[int] = []
    place = len(outside)
    for axis in new_axes:
        first = np.take(full, [0], axis=place)
        if new[axis] == 1 or bool((full == first).all()):
            full = first.squeeze(place)
        else:
            kept_axes.append(axis)
            place += 1
    if len(kept_axes) > 1:
        store.rectangular(full, whole_rows=True)
    order: list[int] = []
    for axis in entry.order:
        if axis in outside:
            order.append(axis)
        elif not any(placed >= _NEW and placed - _NEW in kept_axes for placed in order):
            order.extend(_NEW + kept for kept in kept_axes)
    if not outside and not kept_axes:
        store.freeze(full, "all positions are one channel")
        return None
    axes = outside + [_NEW + axis for axis in kept_axes]
    by_place = sorted(range(len(axes)), key=axes.__getitem__)
    return Entry(tuple(axes[i] for i in by_place), full.transpose(by_place), tuple(order), entry.fresh)


def _disjoint(store: LabelStore, entries: list[Entry]) -> tuple[Entry, ...]:
    """Where two channel axes were merged into one, only the larger keeps its labels."""
    kept: list[Entry] = []
    for entry in sorted(entries, key=lambda e: (e.fresh, -len(np.unique(e.labels)))):
        if any(set(entry.axes) & set(other.axes) for other in kept):
            if not entry.fresh:
                store.freeze(entry.labels, "two channel axes are merged into one")
        else:
            kept.append(entry)
    return tuple(kept)
