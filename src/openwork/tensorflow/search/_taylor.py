"""First-order Taylor sensitivity: the mean over samples of |weight * gradient|, summed over what reads a channel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork import importance
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

    The scores say how many channels of a layer go. Which ones, `rankings`, is their L2 magnitude: a few hundred samples
    tell layers apart well, single channels less so, and after fine-tuning what is left of a channel's weights counts
    for more than its slope on these samples. Channels with a score of 0 go first.
    """

    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """See `DataSensitivity.scores`; sets `rankings`."""
        scores = super().scores(groups)
        weights, criterion = self.search_graph.weights, importance.get("l2")
        self.rankings = [
            np.where(values > 0, criterion.score(group, weights), 0.0)
            for group, values in zip(groups, scores, strict=True)
        ]
        return scores

    def piece_scores(self, groups: Sequence[PruneGroup], piece: Feed) -> list[FloatArray]:
        """See `DataSensitivity.piece_scores`."""
        return [np.abs(slopes) for slopes in self.slopes(groups, piece)]
