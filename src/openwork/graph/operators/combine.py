"""Concatenation and stacking: label arrays are concatenated along the axis, tied along all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork.graph.labels import RIGID, Entry, LabelMap, LabelStore
from openwork.graph.operators.pointwise import merge

__all__ = ["concat", "pad", "stack"]

_FIXED = "concatenated with an axis of fixed length"


def concat(store: LabelStore, tensors: Sequence[LabelMap], axis: int) -> LabelMap:
    """Join tensors along `axis`; parts without labels there are fixed segments."""
    full = [tensor for tensor in tensors if 0 not in tensor.shape]
    tensors = _with_whole_rows(store, full or list(tensors), axis)
    shape = list(tensors[0].shape)
    shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
    along = [tensor.entry(axis) for tensor in tensors]
    joined: list[Entry] = []
    if any(entry is not None for entry in along):
        same = {None if entry is None else (entry.axes, entry.order) for entry in along}
        if len(same) > 1 or None in same:
            # Rows that lose different positions cannot stand beside fixed ones.
            along = [
                None if entry is None else store.pin(entry, [a for a in entry.axes if a != axis], _FIXED)
                for entry in along
            ]
        parts = []
        reference = next(entry for entry in along if entry is not None)
        for tensor, entry in zip(tensors, along, strict=True):
            if entry is not None:
                parts.append(entry.labels)
            else:
                parts.append(np.full(tensor.shape[axis], RIGID, dtype=np.int64))
        place = reference.axes.index(axis)
        labels = np.concatenate(parts, axis=place)
        joined.append(
            Entry(reference.axes, labels, reference.order, all(entry is None or entry.fresh for entry in along))
        )
    covered = {a for entry in joined for a in entry.axes} | {axis}
    operands = []
    for tensor, own in zip(tensors, (tensor.entry(axis) for tensor in tensors), strict=True):
        others = [entry for entry in tensor.entries if entry is not own]
        labelled = {a for entry in others for a in entry.axes}
        rigid = {a for a, size in enumerate(tensor.shape) if size > 1 and a not in labelled and a not in covered}
        operands.append((others, rigid, tensor.weight))
    merged = merge(store, operands, _FIXED)
    clash = [entry for entry in merged if set(entry.axes) & covered]
    for entry in clash:
        store.freeze(entry.labels, _FIXED)
    entries = (*joined, *(entry for entry in merged if entry not in clash))
    return LabelMap(tuple(shape), entries, all(tensor.weight for tensor in tensors))


def _with_whole_rows(store: LabelStore, tensors: list[LabelMap], axis: int) -> list[LabelMap]:
    """Where one part is fixed along `axis` but its rows may go (heads whose features have turned), rows of the other
    parts go as a whole too."""
    fixed = [tensor for tensor in tensors if tensor.entry(axis) is None]
    rows = {a for tensor in tensors for e in [tensor.entry(axis)] if e is not None for a in e.axes if a != axis}
    if not fixed or not rows or any(tensor.entry(a) is None for tensor in fixed for a in rows):
        return tensors
    result = []
    for tensor in tensors:
        own = tensor.entry(axis)
        if own is not None and len(own.axes) > 1:
            narrowed = store.collapse(own, axis)
            assert narrowed is not None  # its rows are left
            tensor = LabelMap(tensor.shape, tuple(narrowed if e is own else e for e in tensor.entries), tensor.weight)
        result.append(tensor)
    return result


def stack(store: LabelStore, tensors: Sequence[LabelMap], axis: int) -> LabelMap:
    """Stack on a new axis. Slices may lose different channels, but the same number."""
    first = tensors[0]
    shape = (*first.shape[:axis], len(tensors), *first.shape[axis:])
    places = {a: a + (a >= axis) for a in range(len(first.shape))}
    weight = all(tensor.weight for tensor in tensors)
    if len(tensors) == 1:
        return LabelMap(shape, tuple(entry.moved(places) for entry in first.entries), weight)
    entries: list[Entry] = []
    if all([entry.axes for entry in tensor.entries] == [entry.axes for entry in first.entries] for tensor in tensors):
        for parts in zip(*(tensor.entries for tensor in tensors), strict=True):
            moved = [part.moved(places) for part in parts]
            if all(np.array_equal(moved[0].labels, other.labels) for other in moved[1:]):
                entries.append(moved[0])
                continue
            place = sum(a < axis for a in moved[0].axes)
            labels = np.stack([part.labels for part in moved], axis=place)
            store.rectangular(np.moveaxis(labels, place, 0))
            axes = (*moved[0].axes[:place], axis, *moved[0].axes[place:])
            entries.append(Entry(axes, labels, (axis, *moved[0].order), all(part.fresh for part in moved)))
        # One axis can be in one entry only: with several labelled axes, slices are tied instead.
        if sum(axis in entry.axes for entry in entries) > 1:
            entries = [
                entry if axis not in entry.axes else store.collapse(entry, axis)  # type: ignore[misc]
                for entry in entries
            ]
        return LabelMap(shape, tuple(entries), weight)
    widened = [
        LabelMap((*t.shape[:axis], 1, *t.shape[axis:]), tuple(e.moved(places) for e in t.entries), t.weight)
        for t in tensors
    ]
    return concat(store, widened, axis)


def pad(store: LabelStore, x: LabelMap, before: Sequence[int], after: Sequence[int]) -> LabelMap:
    """Constant padding: on a labelled axis the new positions are channels of no layer, free to go."""
    shape = tuple(b + size + a for b, size, a in zip(before, x.shape, after, strict=True))
    entries: list[Entry] = []
    for entry in x.entries:
        grown = [axis for axis in entry.axes if before[axis] or after[axis]]
        if not grown:
            entries.append(entry)
        elif len(entry.axes) > 1 or before[grown[0]] < 0 or after[grown[0]] < 0:
            kept = store.pin(entry, grown, "padded")
            if kept is not None:
                entries.append(kept)
        else:
            axis = grown[0]
            parts = []
            for count in (before[axis], after[axis]):
                new = store.fresh((count,))
                parts.append(new[0].labels if new else np.full(count, RIGID, dtype=np.int64))
            labels = np.concatenate([parts[0], entry.labels, parts[1]])
            entries.append(Entry(entry.axes, labels, entry.order, entry.fresh))
    return LabelMap(shape, tuple(entries), x.weight)
