"""First-order Taylor sensitivity: the mean over samples of |weight * gradient|, summed over what reads a channel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork.graph.groups import PruneGroup
from openwork.importance import FloatArray
from openwork.tensorflow.feeds import Feed
from openwork.tensorflow.search._sensitivity import GateSensitivity

__all__ = ["TaylorLossSensitivity"]


class TaylorLossSensitivity(GateSensitivity):
    """|w.g| per channel, summed over all layers of the group, averaged over samples and feeds.

    After Molchanov et al., "Importance Estimation for Neural Network Pruning" (2019). w.g of all weights that read a
    channel, in whichever layers, is the slope of the loss by a gate on the channel. Absolute values are taken sample by
    sample, because in the gradient of a batch the samples of a well-trained net cancel each other.

    The scores say how many channels of a layer go. Which ones, `rankings`, is the mean square of the same slopes.
    """

    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """See `DataSensitivity.scores`; sets `rankings`."""
        self._squares = [np.zeros(group.units) for group in groups]
        scores = super().scores(groups)
        self.rankings = self._squares
        return scores

    def piece_scores(self, groups: Sequence[PruneGroup], piece: Feed) -> list[FloatArray]:
        """See `DataSensitivity.piece_scores`."""
        found = self.slopes(groups, piece)
        for squares, slopes in zip(self._squares, found, strict=True):
            squares += slopes**2
        return [np.abs(slopes) for slopes in found]
