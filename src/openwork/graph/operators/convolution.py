"""Convolutions of any dimension, grouped, depthwise, transposed.

Weight [out, in / groups, taps..], transposed [in, out / groups, taps..]. In a grouped convolution the inner
axis stands for another channel in every group: it gets labels [groups, length] of its own, and the same number
must go from every group. Depthwise (one input channel per group): the input channel and its output channels
are one unit, and the number of groups shrinks with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork.graph.groups import IntArray, Role
from openwork.graph.labels import Entry, LabelMap, LabelStore
from openwork.graph.operators.pointwise import axis_labels, pin_axes, separate, tie_vector

__all__ = ["convolution"]

_TAPS = ""  # kernel taps are no channels: nobody expects them to go, so no reason is reported


def convolution(
    store: LabelStore,
    x: LabelMap,
    weight: LabelMap,
    bias: LabelMap | None,
    groups: int,
    transposed: bool,
    shape: Sequence[int],
    parameter: str | None,
    inner_axis: int = 1,
) -> LabelMap:
    """The result of a convolution.

    Args:
        store: takes what is found.
        x: [batch, channels, space..] (or without batch).
        weight: the filter; need not be a parameter.
        bias: [out] or None.
        groups: number of groups.
        transposed: transposed convolution.
        shape: shape of the result.
        parameter: name of the parameter that `weight` is, if it is one.
        inner_axis: axis 1 of `weight` as the parameter itself numbers it (2 for [taps.., in / groups, out]).
    """
    space = len(weight.shape) - 2
    channel = len(x.shape) - space - 1
    spatial = [axis for axis in range(len(x.shape)) if axis > channel]
    x = pin_axes(store, x, spatial, "moved over by a kernel")
    weight = pin_axes(store, weight, range(2, len(weight.shape)), _TAPS)
    x = separate(store, x, [channel], "convolved over")
    weight = separate(store, weight, [0, 1], "convolution weight")
    entries = [entry for entry in x.entries if channel not in entry.axes]
    incoming = axis_labels(x, channel)
    in_axis, out_axis = (0, 1) if transposed else (1, 0)
    if groups == 1:
        _meet(store, incoming, axis_labels(weight, in_axis))
        outgoing = axis_labels(weight, out_axis)
        if outgoing is not None:
            store.mark(outgoing, Role.PRODUCES)
    else:
        outgoing = _grouped(store, incoming, weight, groups, transposed, parameter, inner_axis)
    if outgoing is not None and shape[channel] > 1:
        entries.append(Entry((channel,), outgoing, (channel,)))
    # Weights made by the network (dynamic convolution) may have labels elsewhere too; batch never carries any.
    result = LabelMap(tuple(shape), tuple(entry for entry in entries if max(entry.axes) < len(shape)))
    return result if bias is None else tie_vector(store, result, channel, bias)


def _meet(store: LabelStore, incoming: IntArray | None, inner: IntArray | None) -> None:
    if inner is not None:
        store.mark(inner, Role.CONSUMES)
    if incoming is not None and inner is not None:
        store.unify(incoming, inner)
    elif incoming is not None:
        store.freeze(incoming, "convolved with an axis of fixed length")
    elif inner is not None:
        store.freeze(inner, "reads channels that are fixed")


def _grouped(
    store: LabelStore,
    incoming: IntArray | None,
    weight: LabelMap,
    groups: int,
    transposed: bool,
    parameter: str | None,
    inner_axis: int,
) -> IntArray | None:
    """Labels of the output channels of a convolution with groups."""
    outer, inner = weight.shape[0], weight.shape[1]
    outer_labels, inner_labels = axis_labels(weight, 0), axis_labels(weight, 1)
    depthwise = outer == groups if transposed else inner == 1
    if outer_labels is None:
        if incoming is not None:
            store.freeze(incoming, "grouped convolution with a computed weight")
        store.freeze_map(weight, "grouped convolution with a computed weight")
        return None
    rows = outer_labels.reshape(groups, outer // groups)
    if parameter is None and not depthwise and not transposed and inner_labels is not None:
        # A computed weight has one set of inner labels: every group loses the same positions.
        store.mark(inner_labels, Role.CONSUMES)
        store.mark(rows, Role.PRODUCES)
        store.rectangular(rows)
        if rows.shape[1] == 1:
            store.freeze(rows, "the only output channel of each group")
        if incoming is None:
            store.freeze(inner_labels, "reads channels that are fixed")
        else:
            store.unify(incoming.reshape(groups, inner), inner_labels[None])
        return rows.ravel()
    if parameter is None and not depthwise:
        if incoming is not None:
            store.freeze(incoming, "grouped convolution with a computed weight")
        store.freeze_map(weight, "grouped convolution with a computed weight")
        return None
    if inner_labels is not None:
        # A position of the inner axis is another channel in every group: the plain labels say nothing.
        store.freeze(inner_labels, "")
    if depthwise:
        if incoming is None:
            store.freeze(rows, "reads channels that are fixed")
            return None
        # Output channels of one input channel: rows of the weight, or its inner axis when transposed.
        store.unify(rows, incoming.reshape(groups, 1))
        return np.repeat(outer_labels, inner) if transposed else outer_labels
    assert parameter is not None
    grouped = store.grouped_axis(parameter, inner_axis, groups, inner)
    into, out = (rows, grouped) if transposed else (grouped, rows)
    store.mark(into, Role.CONSUMES)
    store.mark(out, Role.PRODUCES)
    store.rectangular(into)
    store.rectangular(out)
    if out.shape[1] == 1:
        store.freeze(out, "the only output channel of each group")
    _meet(store, incoming, into.ravel())
    return out.ravel()
