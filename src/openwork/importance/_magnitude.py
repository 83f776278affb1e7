"""Magnitude: sum of |w| (L1) or root of the sum of w^2 (L2) over all weights that a unit takes with it."""

from __future__ import annotations

import abc
from typing import ClassVar

import numpy as np

from openwork.graph.groups import Member, PruneGroup, Role
from openwork.importance._base import (
    ArraySource,
    FloatArray,
    GradientSource,
    Importance,
    channel_sums,
    read,
    read_square_sums,
    unit_sums,
)

__all__ = ["L1Magnitude", "L2Magnitude"]


class _Magnitude(Importance):
    @abc.abstractmethod
    def norms(self, member: Member, weights: ArraySource, units: int) -> FloatArray:
        """The norm of what each unit has in a member: float64 [units]."""

    def score(self, group: PruneGroup, weights: ArraySource, gradients: GradientSource | None = None) -> FloatArray:
        """See `Importance.score`; gradients are not read.

        Producers and consumers count (a channel that nobody reads is worth nothing, however loud); the mean
        over the members, each divided by its own mean, keeps a large layer from outvoting a small one.
        """
        members = [member for member in group.members if member.role is not Role.CARRIES] or group.members
        total = np.zeros(group.units)
        for member in members:
            norms = self.norms(member, weights, group.units)
            total += norms / (norms.mean() or 1.0)
        return total / max(1, len(members))


class L1Magnitude(_Magnitude):
    """Sum of absolute weights (Li et al., "Pruning Filters for Efficient ConvNets", 2017), group-wise."""

    name: ClassVar[str] = "l1"

    def norms(self, member: Member, weights: ArraySource, units: int) -> FloatArray:
        """See `_Magnitude.norms`."""
        values = np.abs(read(weights, member.parameter))
        return unit_sums(member, channel_sums(member, values), units)


class L2Magnitude(_Magnitude):
    """Euclidean norm of the weights (Li et al., 2017; He et al., "Soft Filter Pruning", 2018), group-wise."""

    name: ClassVar[str] = "l2"

    def norms(self, member: Member, weights: ArraySource, units: int) -> FloatArray:
        """See `_Magnitude.norms`."""
        return np.sqrt(unit_sums(member, read_square_sums(weights, member)[0], units))
