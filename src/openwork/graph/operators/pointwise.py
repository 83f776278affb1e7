"""Pointwise operators with broadcasting: equal places are equal channels.

out[i, j] = f(a[i, j], b[i, j]): removing position i of the result removes it from each operand that has that
axis at full length. An operand that has the axis at full length without labels holds it fixed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from openwork.graph.groups import IntArray
from openwork.graph.labels import Entry, LabelMap, LabelStore

__all__ = ["broadcast", "merge", "pointwise"]

_FIXED = "tied to an axis of fixed length"


def broadcast(tensor: LabelMap, shape: Sequence[int]) -> tuple[list[Entry], set[int]]:
    """Entries of `tensor` on the axes of the broadcast `shape`, and the axes that it holds at fixed length."""
    shift = len(shape) - len(tensor.shape)
    places = {axis: axis + shift for axis in range(len(tensor.shape))}
    entries = [entry.moved(places) if shift else entry for entry in tensor.entries]
    labelled = {axis for entry in entries for axis in entry.axes}
    rigid = {
        axis + shift
        for axis, size in enumerate(tensor.shape)
        if size > 1 and size == shape[axis + shift] and axis + shift not in labelled
    }
    return entries, rigid


def merge(
    store: LabelStore, operands: Iterable[tuple[Sequence[Entry], set[int], bool]], why: str = _FIXED
) -> tuple[Entry, ...]:
    """One set of entries for operands that share axes.

    Args:
        store: takes what is found.
        operands: per operand its entries, its rigid axes, and whether it is computed from parameters only.
        why: reason for labels that meet a rigid axis.
    """
    given = [(list(entries), rigid, weight) for entries, rigid, weight in operands]
    rigid_axes = set().union(*(rigid for _, rigid, _ in given)) if given else set()
    merged: list[tuple[Entry, bool]] = []
    for entries, _, weight in given:
        for original in entries:
            entry = store.pin(original, [axis for axis in original.axes if axis in rigid_axes], why)
            while entry is not None:
                index = next((i for i, (old, _) in enumerate(merged) if set(old.axes) & set(entry.axes)), None)
                if index is None:
                    merged.append((entry, weight))
                    break
                old, old_weight = merged.pop(index)
                if old.axes == entry.axes:
                    store.unify(old.labels, entry.labels)
                    keep = entry if old.fresh else old
                    merged.insert(index, (keep, old_weight and weight))
                    break
                narrowed, rest = _reconcile(store, (old, old_weight), (entry, weight))
                if narrowed is not None:
                    merged.insert(index, (narrowed, old_weight))
                left = {axis for kept in (narrowed, rest) if kept is not None for axis in kept.axes}
                lost = (set(old.axes) | set(entry.axes)) - left
                if lost:
                    # Their operand keeps its full length there, so all others have to.
                    rigid_axes |= lost
                    merged = [
                        (kept, its_weight)
                        for other, its_weight in merged
                        if (kept := store.pin(other, [axis for axis in other.axes if axis in lost], why)) is not None
                    ]
                entry = rest
    return tuple(entry for entry, _ in merged)


def _reconcile(
    store: LabelStore, first: tuple[Entry, bool], second: tuple[Entry, bool]
) -> tuple[Entry | None, Entry | None]:
    """Narrow two entries that overlap in part until their axes are equal or disjoint.

    Rows times columns (heads times features) against a plain vector of a weight over the columns: the vector
    is shared by all rows, so rows remain units and the vector stays whole. In all other cases only the axes in
    common keep labels.
    """
    (a, a_weight), (b, b_weight) = first, second
    for wide, narrow, narrow_weight in ((a, b, b_weight), (b, a, a_weight)):
        shared = [axis for axis in wide.axes if axis in narrow.axes]
        if narrow_weight and len(narrow.axes) == 1 and len(wide.axes) > 1 and narrow.axes == wide.order[-1:]:
            store.freeze(narrow.labels, "one vector shared by all rows (heads)")
            kept = store.pin(wide, shared, _FIXED)
            return (kept, None) if wide is a else (None, kept)
    common = set(a.axes) & set(b.axes)
    a_kept = store.pin(a, [axis for axis in a.axes if axis not in common], _FIXED)
    b_kept = store.pin(b, [axis for axis in b.axes if axis not in common], _FIXED)
    return a_kept, b_kept


def pointwise(store: LabelStore, operands: Sequence[LabelMap], shape: Sequence[int]) -> LabelMap:
    """The result of an elementwise operator on broadcast operands."""
    weight = bool(operands) and all(operand.weight for operand in operands)
    # The largest operand first: its labels go on, so that a filter, not its gain, counts as what a layer reads.
    ordered = sorted(operands, key=lambda operand: -math.prod(operand.shape))
    parts = [(*broadcast(operand, shape), operand.weight) for operand in ordered]
    return LabelMap(tuple(shape), merge(store, parts), weight)


def tie_vector(store: LabelStore, tensor: LabelMap, axis: int, vector: LabelMap) -> LabelMap:
    """Tie a per-channel vector (bias, norm weight, statistic) to an axis of a tensor."""
    if vector.shape == () or vector.shape[0] == 1:
        return tensor
    placed = [entry.moved({0: axis}) for entry in vector.entries]
    rigid = set() if placed else {axis}
    own_rigid = set() if tensor.entry(axis) is not None or tensor.shape[axis] == 1 else {axis}
    entries = merge(store, [(tensor.entries, own_rigid, tensor.weight), (placed, rigid, vector.weight)])
    return LabelMap(tensor.shape, entries, tensor.weight)


def pin_axes(store: LabelStore, tensor: LabelMap, axes: Sequence[int], why: str) -> LabelMap:
    """The tensor after the given axes were pinned at full length."""
    entries = [store.pin(entry, axes, why) for entry in tensor.entries]
    return LabelMap(tensor.shape, tuple(entry for entry in entries if entry is not None), tensor.weight)


def separate(store: LabelStore, tensor: LabelMap, axes: Sequence[int], why: str) -> LabelMap:
    """Let the given axes have labels of their own only: joint entries are collapsed along them.

    A single-axis entry on one of the axes is left; a joint entry that lies wholly within the axes keeps its
    most major axis.
    """
    entries: list[Entry | None] = []
    for entry in tensor.entries:
        if len(entry.axes) == 1 or not set(entry.axes) & set(axes):
            entries.append(entry)
            continue
        inside = [axis for axis in entry.order if axis in axes]
        if len(inside) == len(entry.axes):
            inside = inside[1:]
        entries.append(store.pin(entry, inside, why))
    return LabelMap(tensor.shape, tuple(entry for entry in entries if entry is not None), tensor.weight)


def axis_labels(tensor: LabelMap, axis: int) -> IntArray | None:
    """Labels of an axis that has an entry of its own."""
    entry = tensor.entry(axis)
    return entry.labels if entry is not None and len(entry.axes) == 1 else None
