"""Normalisations with per-channel parameters."""

from __future__ import annotations

from collections.abc import Sequence

from openwork.graph.labels import LabelMap, LabelStore
from openwork.graph.operators.pointwise import axis_labels, pointwise, separate, tie_vector
from openwork.graph.operators.reduce import mixed_along

__all__ = ["batch_norm", "group_norm", "layer_norm"]


def batch_norm(store: LabelStore, x: LabelMap, vectors: Sequence[LabelMap | None], axis: int = 1) -> LabelMap:
    """Batch or instance norm: weight, bias and statistics are tied to the channel axis."""
    x = separate(store, x, [a for a in range(len(x.shape)) if a != axis], "normalised over")
    for vector in vectors:
        if vector is not None:
            x = tie_vector(store, x, axis, vector)
    return x


def layer_norm(store: LabelStore, x: LabelMap, axes: Sequence[int], vectors: Sequence[LabelMap | None]) -> LabelMap:
    """Layer or RMS norm over the last axes; parameters have the shape of those axes."""
    x = mixed_along(store, x, axes)
    return pointwise(store, [x, *(vector for vector in vectors if vector is not None)], x.shape)


def group_norm(
    store: LabelStore, x: LabelMap, groups: int, vectors: Sequence[LabelMap | None], axis: int = 1
) -> LabelMap:
    """Group norm: statistics over equal parts of the channel axis, which must stay equal."""
    x = separate(store, x, [a for a in range(len(x.shape)) if a != axis] + [axis], "normalised over")
    labels = axis_labels(x, axis)
    if labels is not None and 1 < groups < x.shape[axis]:
        store.rectangular(labels.reshape(groups, -1))
    for vector in vectors:
        if vector is not None:
            x = tie_vector(store, x, axis, vector)
    return x
