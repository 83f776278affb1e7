"""Fisher information of a unit's gate: (sum of w * dloss/dw)^2, the second-order estimate of the loss."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from openwork.graph.groups import PruneGroup
from openwork.importance._base import ArraySource, FloatArray, GradientSource, Importance
from openwork.importance._taylor import member_products

__all__ = ["Fisher"]


class Fisher(Importance):
    """Squared w.g per member, summed over all members of the group.

    After Theis et al., "Faster gaze prediction with dense networks and Fisher pruning" (2018), and Liu et
    al., "Group Fisher Pruning" (2021). Gradients are those of one batch; average the scores of several.
    """

    name: ClassVar[str] = "fisher"
    needs_gradients: ClassVar[bool] = True

    def score(self, group: PruneGroup, weights: ArraySource, gradients: GradientSource | None = None) -> FloatArray:
        """See `Importance.score`."""
        total = np.zeros(group.units)
        for product in member_products(self, group, weights, gradients):
            total += product**2
        return total
