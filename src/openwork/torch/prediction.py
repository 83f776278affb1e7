"""The shapes that a trace's operators should have after a removal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from openwork.graph.labels import Entry, LabelMap
from openwork.graph.sizes import surviving
from openwork.torch.trace import Trace

__all__ = ["Prediction", "Source"]

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Source:
    """Where a length stands in a trace: a record, its ``inputs``, ``outputs`` or size arguments (``sizes``).

    `index` is the axis of tensor `number`, or the place among the size arguments.
    """

    place: int
    side: str
    number: int
    index: int

    def moved(self, by: int) -> Source:
        return replace(self, place=self.place + by)


class Prediction:
    """Predicted shapes of all records of a trace, each computed once.

    Args:
        trace: the labelled original run.
        dead: bool [labels], what dies.
    """

    def __init__(self, trace: Trace, dead: np.ndarray) -> None:
        self.trace = trace
        self.dead = dead
        self._entries: dict[int, tuple[Entry, dict[int, int]]] = {}
        self._records: dict[int, tuple[Shapes, Shapes, list[int] | None]] = {}

    def shape(self, tensor: LabelMap) -> tuple[int, ...]:
        """Shape of one traced tensor."""
        shape = list(tensor.shape)
        for entry in tensor.entries:
            known = self._entries.get(id(entry))
            if known is None:
                known = self._entries[id(entry)] = (entry, surviving(entry, self.dead))
            for axis, length in known[1].items():
                shape[axis] = length
        return tuple(shape)

    def of(self, place: int) -> tuple[Shapes, Shapes, list[int] | None]:
        """Shapes of the inputs and outputs of a record, and its size arguments if it has any."""
        known = self._records.get(place)
        if known is None:
            record = self.trace.records[place]
            inputs = [self.shape(tensor) for tensor in record.inputs]
            outputs = [self.shape(tensor) for tensor in record.outputs]
            rule = record.rule
            sizes = None
            if record.sizes is not None and rule is not None and rule.expected is not None:
                sizes = rule.expected(record, inputs, outputs, self.dead)
            known = self._records[place] = (inputs, outputs, sizes)
        return known

    def length(self, source: Source) -> int:
        """The predicted length at a place; the old one where none can be told."""
        sizes = self.of(source.place)[2]
        if source.side == "sizes":
            before = self.trace.records[source.place].sizes or []
            return (before if sizes is None else sizes)[source.index]
        return self.shape(getattr(self.trace.records[source.place], source.side)[source.number])[source.index]

    def has(self, source: Source, length: int) -> bool:
        """Whether the trace has this place, and had this length there."""
        if not 0 <= source.place < len(self.trace.records):
            return False
        record = self.trace.records[source.place]
        if source.side == "sizes":
            return record.sizes is not None and record.sizes[source.index : source.index + 1] == [length]
        tensors = getattr(record, source.side)
        if source.number >= len(tensors):
            return False
        return tensors[source.number].shape[source.index : source.index + 1] == (length,)

    def at_risk(self) -> bool:
        """Whether Python code may see or state a length that changes."""
        if any(self.dead[entry.labels].any() for entry in self.trace.lengths_read):
            return True
        return any(
            record.sizes is not None and not record.certain and self.of(place)[2] not in (None, record.sizes)
            for place, record in enumerate(self.trace.records)
        )
