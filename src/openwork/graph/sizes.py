"""Lengths of axes after a removal: predicted for a given choice, or as a formula in kept units."""

from __future__ import annotations

import numpy as np

from openwork.graph.groups import AxisSize
from openwork.graph.labels import Entry, LabelMap
from openwork.graph.settle import Settled

__all__ = ["axis_size", "axis_sizes", "surviving", "surviving_shape"]


def surviving(entry: Entry, dead: np.ndarray) -> dict[int, int]:
    """Length of each axis of an entry after labels died. Ragged rows have equal length by construction."""
    alive = ~dead[entry.labels]
    if alive.all():
        return dict(zip(entry.axes, entry.labels.shape, strict=True))
    lengths = {}
    for axis in entry.axes:
        lives = np.asarray(alive)
        # A row lives while anything in it does; rows may be ragged, but all that live have equal length.
        for minor in entry.order[entry.order.index(axis) + 1 :]:
            lives = np.asarray(lives.any(axis=entry.axes.index(minor), keepdims=True))
        lengths[axis] = int(lives.sum(axis=entry.axes.index(axis)).max())
    return lengths


def surviving_shape(tensor: LabelMap, dead: np.ndarray) -> tuple[int, ...]:
    """Shape of a traced tensor after labels died."""
    shape = list(tensor.shape)
    for entry in tensor.entries:
        for axis, length in surviving(entry, dead).items():
            shape[axis] = length
    return tuple(shape)


def axis_size(entry: Entry, axis: int, settled: Settled) -> AxisSize:
    """Length of one axis as a function of kept units."""
    components = settled.component[entry.labels]
    size = components.shape[entry.axes.index(axis)]
    for minor in entry.order[entry.order.index(axis) + 1 :]:
        place = entry.axes.index(minor)
        first = np.take(components, [0], axis=place)
        if not bool((components == first).all()):
            return AxisSize(float(size))  # rows do not go as a whole
        components = first
    matrix = np.moveaxis(components, entry.axes.index(axis), 0).reshape(size, -1)
    if bool((matrix == matrix[:, :1]).all()):
        matrix = matrix[:, :1]
    rows = matrix.shape[1]
    flat = matrix.ravel()
    flat = flat[settled.group_of[flat] >= 0]
    group_of, block_of = settled.group_of[flat], settled.block_of[flat]
    fixed, terms = float(size), []
    for index in np.unique(group_of).tolist():
        group = settled.groups[index]
        positions = np.bincount(block_of[group_of == index], minlength=group.blocks)
        sizes = np.bincount(group.block_of, minlength=group.blocks)
        # Positions lost with each unit lost, as the blocks lose units in fixed proportion.
        slope = float((positions / sizes * group.steps).sum() / group.steps.sum()) / rows
        fixed -= slope * group.units
        terms.append((index, slope))
    return AxisSize(fixed, tuple(terms))


def axis_sizes(tensor: LabelMap, settled: Settled) -> list[AxisSize]:
    """Lengths of all axes of a traced tensor."""
    sizes = [AxisSize(float(size)) for size in tensor.shape]
    for entry in tensor.entries:
        for axis in entry.axes:
            sizes[axis] = axis_size(entry, axis, settled)
    return sizes
