"""What a traced model costs, as formulas in kept units."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from openwork.graph.groups import AxisSize, CostTerm
from openwork.graph.labels import Entry, LabelMap
from openwork.graph.settle import Settled
from openwork.graph.sizes import axis_size
from openwork.torch.trace import Trace

__all__ = ["cost_terms"]


def cost_terms(trace: Trace, settled: Settled, parameters: Mapping[str, torch.Tensor]) -> list[CostTerm]:
    """Terms of kind ``macs`` (contractions), ``params`` (parameters) and ``activations`` (results)."""
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

    for record in trace.records:
        if record.cost is not None:
            factors = [size(tensor, axis) for tensor, axis in record.cost.factors]
            terms.append(term("macs", record.module, record.name, factors, record.cost.divisor))
        for tensor in record.outputs[:1]:
            factors = [size(tensor, axis) for axis in range(len(tensor.shape))]
            terms.append(term("activations", record.module, record.name, factors, 1.0))
    grouped = {(axis.parameter, axis.axis): axis for axis in trace.store.owned if axis.blocks > 1}
    for name, parameter in parameters.items():
        labels = trace.parameters.get(name)
        if labels is None:
            terms.append(CostTerm("params", name, "", float(parameter.numel())))
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
