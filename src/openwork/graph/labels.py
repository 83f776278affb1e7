"""Channel labels: which positions of which axes live or die together.

Every position of every axis of every parameter has an integer label. A tensor's `LabelMap` says which label
each of its positions carries. Operators only *unify* labels, *rearrange* label arrays, *freeze* labels with a
reason, or ask for a tensor to stay *rectangular*. All of it is NumPy arrays appended to lists; the labels are
resolved once, at the end (`openwork.graph.settle`).

Invariants of a `LabelMap`: an axis is in at most one entry; axes of length 1 are in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from openwork.graph.groups import IntArray, Role

__all__ = ["RIGID", "Entry", "LabelMap", "LabelStore", "OwnedAxis"]

# The label of everything that can never be removed: positions without a channel's meaning.
RIGID = 0


@dataclass(frozen=True, eq=False)
class Entry:
    """The labels of some axes of a tensor.

    Attributes:
        axes: axes of the tensor, ascending.
        labels: one dimension per axis, of that axis' length; position (i, j, ..) dies with labels[i, j, ..].
        order: the same axes from major to minor in the storage that the labels were split from. When
            different rows lose different positions, only the minor axis is ragged, and merging the axes in
            another order would scramble them.
        fresh: the labels belong to no parameter (the axis was made by expand, zeros, ...).
    """

    axes: tuple[int, ...]
    labels: IntArray
    order: tuple[int, ...]
    fresh: bool = False

    def moved(self, new_axis: dict[int, int]) -> Entry:
        """The entry after its axes got other places in the tensor."""
        axes = [new_axis[axis] for axis in self.axes]
        by_place = sorted(range(len(axes)), key=axes.__getitem__)
        return Entry(
            tuple(axes[i] for i in by_place),
            self.labels.transpose(by_place),
            tuple(new_axis[axis] for axis in self.order),
            self.fresh,
        )


@dataclass(frozen=True, eq=False)
class LabelMap:
    """The labels of a tensor.

    Attributes:
        shape: its shape.
        entries: labelled axes; all other axes are rigid.
        weight: computed from parameters and buffers only.
    """

    shape: tuple[int, ...]
    entries: tuple[Entry, ...] = ()
    weight: bool = False

    def entry(self, axis: int) -> Entry | None:
        for entry in self.entries:
            if axis in entry.axes:
                return entry
        return None

    @property
    def labels(self) -> list[IntArray]:
        return [entry.labels for entry in self.entries]

    def with_shape(self, shape: Sequence[int]) -> LabelMap:
        return replace(self, shape=tuple(shape))


@dataclass(frozen=True)
class OwnedAxis:
    """Labels ``start .. start + size`` belong to one axis of a parameter."""

    parameter: str
    axis: int
    start: int
    size: int
    blocks: int = 1


class LabelStore:
    """Makes labels and collects what operators say of them.

    Attributes:
        location: where the operator being watched runs; becomes part of each reason.
        layers: parameter -> name of its layer, where the parameter's name does not say it.
    """

    def __init__(self) -> None:
        self.location = ""
        self.layers: dict[str, str] = {}
        self.owned: list[OwnedAxis] = []
        self.pairs: list[tuple[IntArray, IntArray]] = []
        self.frozen: list[tuple[IntArray, str]] = []
        self.rectangles: list[tuple[IntArray, str, bool]] = []
        self.roles: list[tuple[IntArray, Role]] = []
        self.judged: list[tuple[IntArray, str]] = []
        self.multiples: list[tuple[IntArray, int]] = []
        self._count = 1
        self._grouped: dict[tuple[str, int], OwnedAxis] = {}

    @property
    def count(self) -> int:
        """Number of labels, RIGID included."""
        return self._count

    def _new(self, size: int) -> IntArray:
        labels = np.arange(self._count, self._count + size, dtype=np.int64)
        self._count += size
        return labels

    def parameter(self, name: str, shape: Sequence[int]) -> LabelMap:
        """The map of a parameter or buffer: every axis longer than 1 gets labels of its own."""
        entries = []
        for axis, size in enumerate(shape):
            if size > 1:
                labels = self._new(size)
                self.owned.append(OwnedAxis(name, axis, int(labels[0]), size))
                entries.append(Entry((axis,), labels, (axis,)))
        return LabelMap(tuple(shape), tuple(entries), weight=True)

    def grouped_axis(self, name: str, axis: int, groups: int, length: int) -> IntArray:
        """Labels [groups, length] for an axis whose positions mean another channel in each group.

        The input axis of a grouped convolution has `length` positions, but carries groups * length channels.
        """
        owned = self._grouped.get((name, axis))
        if owned is None:
            labels = self._new(groups * length)
            owned = OwnedAxis(name, axis, int(labels[0]), groups * length, groups)
            self.owned.append(owned)
            self._grouped[name, axis] = owned
        return np.arange(owned.start, owned.start + owned.size, dtype=np.int64).reshape(owned.blocks, -1)

    def fresh(self, shape: Sequence[int], axes: Sequence[int] | None = None) -> tuple[Entry, ...]:
        """Entries for axes along which a tensor is uniform: any position may go, none is tied yet."""
        chosen = range(len(shape)) if axes is None else axes
        return tuple(Entry((axis,), self._new(shape[axis]), (axis,), fresh=True) for axis in chosen if shape[axis] > 1)

    def unify(self, first: IntArray, second: IntArray) -> None:
        """Positions of equal place in both arrays are one channel."""
        if first is not second:
            first, second = np.broadcast_arrays(first, second)
            self.pairs.append((first.ravel(), second.ravel()))

    def freeze(self, labels: IntArray, why: str) -> None:
        """These labels are never removed; `why` is completed by the location. Empty: not worth reporting."""
        self.frozen.append((labels.ravel(), f"{why} ({self.location})" if why and self.location else why))

    def freeze_map(self, tensor: LabelMap, why: str) -> None:
        for entry in tensor.entries:
            self.freeze(entry.labels, why)

    def judge(self, tensor: LabelMap, why: str) -> None:
        """Freeze these channels unless a weight reads them."""
        reason = f"{why} ({self.location})" if self.location else why
        self.judged += [(entry.labels.ravel(), reason) for entry in tensor.entries]

    def rectangular(self, labels: IntArray, whole_rows: bool = False) -> None:
        """A tensor has these labels on axes given from major to minor; it must stay rectangular.

        Rows lose the same number of positions. With `whole_rows` a row may also go as a whole (a head of an
        attention); without, every row is needed (groups of a convolution, parts of a split).
        """
        self.rectangles.append((labels, self.location, whole_rows))

    def multiple(self, labels: IntArray, of: int) -> None:
        """Of an axis with these labels only multiples of `of` positions may go (a kernel asks for aligned rows)."""
        if of > 1:
            self.multiples.append((labels.ravel(), of))

    def mark(self, labels: IntArray, role: Role) -> None:
        """The parameter axes that own these labels play this role."""
        self.roles.append((labels.ravel(), role))

    def collapse(self, entry: Entry, axis: int) -> Entry | None:
        """Positions along `axis` stay or go as a whole; the labels stay on the other axes.

        Returns:
            The entry without the axis, or None if no axis is left (then the labels must be frozen by the caller).
        """
        place = entry.axes.index(axis)
        first = np.take(entry.labels, 0, axis=place)
        if len(entry.axes) == 1:
            return None
        self.unify(entry.labels, np.expand_dims(first, place))
        return Entry(
            entry.axes[:place] + entry.axes[place + 1 :],
            first,
            tuple(other for other in entry.order if other != axis),
            entry.fresh,
        )

    def pin(self, entry: Entry, axes: Sequence[int], why: str) -> Entry | None:
        """The given axes must keep their full length: collapse along them, or freeze if nothing else is left."""
        kept: Entry | None = entry
        for axis in axes:
            if kept is None:
                break
            if axis in kept.axes:
                narrowed = self.collapse(kept, axis)
                if narrowed is None:
                    self.freeze(kept.labels, why)
                kept = narrowed
        return kept
