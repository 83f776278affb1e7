"""Lengths that a model's code equates: ``reshape(B, N, C)`` with C taken from the block's input.

The code is right only while heads * features equals the width of the stream. No attribute states that, but the
two lengths may shrink together: rows of labels that must lose the same number of positions.
"""

from __future__ import annotations

import math

import numpy as np

from openwork.graph.groups import IntArray
from openwork.graph.labels import LabelMap
from openwork.graph.sizes import surviving_shape
from openwork.torch.replay import Mismatch
from openwork.torch.trace import Trace

__all__ = ["find_tie"]

_VIEWS = {"torch.reshape", "aten.view.default", "aten._unsafe_view.default", "aten._reshape_alias.default"}
# How far back the other length is looked for.
_REACH = 80


def find_tie(trace: Trace, mismatch: Mismatch, dead: np.ndarray) -> tuple[IntArray, str] | None:
    """Rows of labels [rows, length] that must lose the same number, if that explains a contradiction.

    Args:
        trace: the labelled original run.
        mismatch: a view or reshape whose sizes were computed from another channel count.
        dead: bool [labels], what died in this trial.
    """
    if mismatch.check:
        return _of_check(trace, mismatch, dead)
    record = trace.records[mismatch.index]
    if record.name not in _VIEWS or len(mismatch.given) != len(record.outputs[0].shape):
        return None
    out = record.outputs[0]
    expected = surviving_shape(out, dead)
    for pair in mismatch.pairs:
        for first in range(pair.index, -1, -1):
            for last in range(pair.index, len(out.shape)):
                axes = range(first, last + 1)
                was, given = (math.prod(sizes[axis] for axis in axes) for sizes in (out.shape, mismatch.given))
                if given == math.prod(expected[axis] for axis in axes):
                    continue
                # C // heads drops the remainder, which is less than the number of heads.
                slack = given // max(1, mismatch.given[pair.index]) - 1
                other = _stream(trace, mismatch.index, was, range(given, given + slack + 1), dead)
                if other is None:
                    continue
                rows = _rows(out, list(axes))
                if rows is None:
                    continue
                place = mismatch.stack[-1] if mismatch.stack and mismatch.stack[-1] else "the model itself"
                return np.concatenate([other[None], rows]), f"one length is computed from the other in {place}"
    return None


def _of_check(trace: Trace, mismatch: Mismatch, dead: np.ndarray) -> tuple[IntArray, str] | None:
    """A module's own check fails: tie the lengths in it that were equal and no longer are."""
    module = mismatch.stack[-1] if mismatch.stack else ""
    inside = [record for record in trace.records if record.module == module]
    wanted = {pair.was for pair in mismatch.pairs}
    found: dict[int, dict[bytes, IntArray]] = {}
    for record in inside[:_REACH]:
        for tensor in (*record.inputs, *record.outputs):
            for axis, size in enumerate(tensor.shape):
                if (size in wanted or not wanted) and tensor.entry(axis) is not None:
                    for row in _rows(tensor, [axis]):  # type: ignore[union-attr]
                        found.setdefault(size, {}).setdefault(row.tobytes(), row)
    for rows in found.values():
        if len({int((~dead[row]).sum()) for row in rows.values()}) > 1:
            return np.stack(list(rows.values())), f"{module or 'the model itself'} checks that the lengths are equal"
    return None


def _stream(trace: Trace, index: int, was: int, now: range, dead: np.ndarray) -> IntArray | None:
    """The labels of an earlier axis that had length `was` and now has one in `now`."""
    for place in range(index, max(-1, index - _REACH), -1):
        record = trace.records[place]
        for tensor in record.inputs:
            if tensor.weight:
                continue
            for entry in tensor.entries:
                if len(entry.axes) == 1 and len(entry.labels) == was and int((~dead[entry.labels]).sum()) in now:
                    return entry.labels
    return None


def _rows(out: LabelMap, axes: list[int]) -> IntArray | None:
    """Labels over some axes flattened, one row for each position of the entry's other axes."""
    entry = next((e for e in out.entries if set(e.axes) & set(axes)), None)
    if entry is None:
        return None
    outside = [axis for axis in entry.axes if axis not in axes]
    inside = [axis for axis in entry.axes if axis in axes]
    array = entry.labels.transpose([entry.axes.index(axis) for axis in (*outside, *inside)])
    lead = array.shape[: len(outside)]
    array = array.reshape(lead + tuple(out.shape[axis] if axis in inside else 1 for axis in axes))
    full = np.broadcast_to(array, lead + tuple(out.shape[axis] for axis in axes))
    return full.reshape(-1, math.prod(out.shape[axis] for axis in axes))
