"""First-order Taylor: loss(w) - loss(w without the unit) ~ sum of w * dloss/dw over the unit's weights."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from openwork.graph.groups import PruneGroup
from openwork.importance._base import (
    ArraySource,
    FloatArray,
    GradientSource,
    Importance,
    channel_sums,
    is_learned,
    read,
    read_gradient,
    unit_sums,
)

__all__ = ["Taylor", "member_products"]


def member_products(
    criterion: Importance, group: PruneGroup, weights: ArraySource, gradients: GradientSource | None
) -> list[FloatArray]:
    """Sum of w * g over the weights of each unit, one array [units] for each member that has a gradient."""
    products = []
    for member in group.members:
        if not is_learned(member):
            continue
        gradient = read_gradient(criterion, gradients, member.parameter)
        if gradient is None:
            continue
        values = read(weights, member.parameter)
        products.append(unit_sums(member, channel_sums(member, values * gradient), group.units))
    return products


class Taylor(Importance):
    """First-order Taylor expansion of the loss, |w.g| per member, summed over all members of the group.

    After Molchanov et al., "Importance Estimation for Neural Network Pruning" (2019). Gradients are those of
    one batch; average the scores of several batches, not the gradients.
    """

    name: ClassVar[str] = "taylor"
    needs_gradients: ClassVar[bool] = True

    def score(self, group: PruneGroup, weights: ArraySource, gradients: GradientSource | None = None) -> FloatArray:
        """See `Importance.score`."""
        total = np.zeros(group.units)
        for product in member_products(self, group, weights, gradients):
            total += np.abs(product)
        return total
