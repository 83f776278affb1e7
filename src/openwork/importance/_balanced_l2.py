"""Balanced L2 norm: ||w_c|| / size(w_c), min-max normalised inside each producer; mean over the producers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from openwork.graph.groups import PruneGroup
from openwork.importance._base import (
    ArraySource,
    FloatArray,
    GradientSource,
    Importance,
    counted,
    read_square_sums,
    unit_sums,
)

__all__ = ["BalancedL2"]


class BalancedL2(Importance):
    """The criterion of ``balanced_l2_norm_filter_prune``.

    For each producer, the L2 norm of each output channel's weights over their number, mapped to [0, 1]
    inside that layer, so that no layer outvotes another; a unit's score is the mean over its producers (and,
    where a unit has several channels in one layer, over these). A layer whose channels are all equal votes 0.
    Groups without a producer are scored on their consumers, else on all their members.
    """

    name: ClassVar[str] = "balanced_l2"

    def score(self, group: PruneGroup, weights: ArraySource, gradients: GradientSource | None = None) -> FloatArray:
        """See `Importance.score`; gradients are not read."""
        members = counted(group)
        total = np.zeros(group.units)
        for member in members:
            sums, size = read_square_sums(weights, member)
            norms = np.sqrt(sums) * (member.size / max(1, size))
            low, high = norms.min(initial=np.inf), norms.max(initial=-np.inf)
            balanced = (norms - low) / (high - low) if high > low else np.zeros(member.size)
            share = np.bincount(member.units, minlength=group.units)
            total += unit_sums(member, balanced, group.units) / np.maximum(share, 1)
        return total / max(1, len(members))
