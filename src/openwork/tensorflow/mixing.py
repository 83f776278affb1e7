"""Which groups' channels run through operators that mix them: zeros would count there, smaller tensors do not."""

from __future__ import annotations

import numpy as np

from openwork.tensorflow.analysis import GraphAnalysis
from openwork.tensorflow.verification import PRODUCTS, mixed_axes

__all__ = ["mixed_groups"]


def mixed_groups(analysis: GraphAnalysis) -> dict[int, str]:
    """The first operator that takes statistics across a group's channels, or multiplies two activations along them."""
    settled = analysis.settled
    found: dict[int, str] = {}
    for record in analysis.trace.records:
        if not record.inputs:
            continue
        if record.name in PRODUCTS and not record.parameters:
            entries = [entry for tensor in record.inputs for entry in tensor.entries]
        else:
            axes = set(mixed_axes(record))
            entries = [entry for entry in record.inputs[0].entries if axes & set(entry.axes)]
        for entry in entries:
            for group in np.unique(settled.group_of[settled.component[entry.labels]]).tolist():
                if group >= 0:
                    found.setdefault(group, f"{record.name} {record.module}")
    return found
