"""Contractions (matmul, linear, einsum, attention): sum over an index that both operands have.

out[b, m, n] = sum_k a[b, m, k] * c[b, k, n]. Labels on k are the same channel in both operands and vanish;
labels on free and batch indices go to the result. A *joint* entry (head, k) is collapsed along k: whole rows
(heads) become units, since a row that loses other positions than its partner could not be multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

from openwork.graph.groups import Role
from openwork.graph.labels import Entry, LabelMap, LabelStore
from openwork.graph.operators.pointwise import merge

__all__ = ["contract"]

_FIXED = "multiplied with an axis of fixed length"


def contract(
    store: LabelStore,
    first: LabelMap,
    second: LabelMap,
    indices: tuple[Sequence[str], Sequence[str], Sequence[str]],
    shape: Sequence[int],
) -> LabelMap:
    """The result of a two-operand contraction.

    Args:
        store: takes what is found.
        first, second: operands.
        indices: one index name per axis of first, second and the result, as in einsum.
        shape: shape of the result.
    """
    a_index, b_index, out_index = (list(names) for names in indices)
    summed = [name for name in a_index if name in b_index and name not in out_index]
    if second.weight:
        _mark(store, second, b_index, summed, out_index)
    elif first.weight:
        _mark(store, first, a_index, summed, out_index)
    for name in summed:
        first, second = _consume(store, first, a_index.index(name), second, b_index.index(name))
    alone = [_drop_alone(store, tensor, names, out_index) for tensor, names in ((first, a_index), (second, b_index))]
    operands = []
    for tensor, names in zip(alone, (a_index, b_index), strict=True):
        places = {axis: out_index.index(name) for axis, name in enumerate(names) if name in out_index}
        entries = [entry.moved(places) for entry in tensor.entries]
        labelled = {axis for entry in tensor.entries for axis in entry.axes}
        rigid = {
            place
            for axis, place in places.items()
            if axis not in labelled and tensor.shape[axis] > 1 and tensor.shape[axis] == shape[place]
        }
        operands.append((entries, rigid, tensor.weight))
    # A free index is in one operand only, so only batch indices can meet.
    return LabelMap(tuple(shape), merge(store, operands, _FIXED), first.weight and second.weight)


def _mark(store: LabelStore, weight: LabelMap, names: list[str], summed: list[str], out_index: list[str]) -> None:
    for entry in weight.entries:
        of = {names[axis] for axis in entry.axes}
        if of & set(summed):
            store.mark(entry.labels, Role.CONSUMES)
        elif of & set(out_index):
            store.mark(entry.labels, Role.PRODUCES)


def _consume(
    store: LabelStore, first: LabelMap, a_axis: int, second: LabelMap, b_axis: int
) -> tuple[LabelMap, LabelMap]:
    """Tie the contracted axis of both operands; afterwards neither has labels there."""
    a, b = first.entry(a_axis), second.entry(b_axis)
    if a is not None and b is not None and len(a.axes) == 1 and len(b.axes) == 1:
        store.unify(a.labels, b.labels)
        return _without(first, a, None), _without(second, b, None)
    if a is not None:
        first = _without(first, a, store.pin(a, [a_axis], _FIXED))
    if b is not None:
        second = _without(second, b, store.pin(b, [b_axis], _FIXED))
    return first, second


def _drop_alone(store: LabelStore, tensor: LabelMap, names: list[str], out_index: list[str]) -> LabelMap:
    """Indices of one operand only that are summed away: like a reduction."""
    for entry in tensor.entries:
        gone = [axis for axis in entry.axes if names[axis] not in out_index]
        if gone:
            kept = None if len(gone) == len(entry.axes) else store.pin(entry, gone, _FIXED)
            tensor = _without(tensor, entry, kept)
    return tensor


def _without(tensor: LabelMap, old: Entry, new: Entry | None) -> LabelMap:
    entries = [entry for entry in tensor.entries if entry is not old]
    if new is not None:
        entries.append(new)
    return LabelMap(tensor.shape, tuple(entries), tensor.weight)
