"""What a traced model costs, as formulas in kept units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from openwork.graph.groups import AxisSize, CostTerm
from openwork.graph.labels import Entry, LabelMap, LabelStore
from openwork.graph.settle import Settled
from openwork.graph.sizes import axis_size

__all__ = ["Cost", "Costed", "cost_terms"]


@dataclass(frozen=True, eq=False)
class Cost:
    """Multiply-accumulates of a call: product of the lengths of (map, axis) factors, over `divisor`."""

    factors: tuple[tuple[LabelMap, int], ...]
    divisor: float = 1.0


class Costed(Protocol):
    """What a front end records of an operator."""

    @property
    def name(self) -> str: ...

    @property
    def module(self) -> str: ...

    @property
    def outputs(self) -> Sequence[LabelMap]: ...

    @property
    def cost(self) -> Cost | None: ...


def cost_terms(
    records: Iterable[Costed],
    parameters: Mapping[str, LabelMap | int],
    store: LabelStore,
    settled: Settled,
    samples: int = 1,
) -> list[CostTerm]:
    """Terms of kind ``macs`` (contractions), ``params`` (parameters) and ``activations`` (results).

    Args:
        records: the operators that ran.
        parameters: labels of each parameter, or its number of elements where no operator read it.
        store: the labels.
        settled: what came of them.
        samples: what operators cost is divided by this (a batch length that the front end made up).
    """
    terms = []
    known: dict[tuple[int, int], AxisSize] = {}

    def size(tensor: LabelMap, axis: int) -> AxisSize:
        entry = tensor.entry(axis)
        if entry is None:
            return AxisSize(float(tensor.shape[axis]))
        key = id(entry), axis
        if key not in known:
            known[key] = axis_size(entry, axis, settled)
        return known[key]

    def term(kind: str, name: str, operator: str, factors: list[AxisSize], divisor: float) -> CostTerm:
        constant = 1.0 / divisor
        moving = []
        for factor in factors:
            if factor.terms:
                moving.append(factor)
            else:
                constant *= factor.fixed
        return CostTerm(kind, name, operator, constant, tuple(moving))

    for record in records:
        if record.cost is not None:
            factors = [size(tensor, axis) for tensor, axis in record.cost.factors]
            terms.append(term("macs", record.module, record.name, factors, record.cost.divisor * samples))
        for tensor in record.outputs[:1]:
            factors = [size(tensor, axis) for axis in range(len(tensor.shape))]
            terms.append(term("activations", record.module, record.name, factors, float(samples)))
    grouped = {(axis.parameter, axis.axis): axis for axis in store.owned if axis.blocks > 1}
    for name, labels in parameters.items():
        if isinstance(labels, int):
            terms.append(CostTerm("params", name, "", float(labels)))
            continue
        factors = []
        divisor = 1.0
        for axis in range(len(labels.shape)):
            owned = grouped.get((name, axis))
            if owned is None:
                factors.append(size(labels, axis))
            else:
                channels = np.arange(owned.start, owned.start + owned.size)
                factors.append(axis_size(Entry((0,), channels, (0,)), 0, settled))
                divisor *= owned.blocks
        terms.append(term("params", name, "", factors, divisor))
    return terms
