"""First-order Taylor sensitivity: the mean over samples of |weight * gradient|, summed over what reads a channel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork import importance
from openwork.graph.groups import PruneGroup
from openwork.importance import FloatArray
from openwork.torch.prune import weights_of
from openwork.torch.search._batches import Batch
from openwork.torch.search._gates import GateSensitivity

__all__ = ["TaylorLossSensitivity"]


class TaylorLossSensitivity(GateSensitivity):
    """|w.g| per channel, summed over all layers of the group, averaged over samples and batches.

    After Molchanov et al., "Importance Estimation for Neural Network Pruning" (2019). w.g of all weights that read a
    channel, in whichever layers, is the slope of the loss by a gate on the channel: what the loss loses with it to
    first order. The weights that make and carry it (filter, norm, bias) stand before the same gate, and counting them
    again adds their number to the score and no knowledge. Absolute values are taken sample by sample: in the
    gradient of a batch the samples cancel each other, in a well-trained net to next to nothing, and what is left is
    noise.

    The scores say how many channels of a layer go. Which ones, `rankings`, is their L2 magnitude: a few hundred samples
    tell layers apart well, single channels less so, and after fine-tuning what is left of a channel's weights counts
    for more than its slope on these samples. Channels with a score of 0 go first.

    Args:
        piece: see `GateSensitivity`.
    """

    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """See `DataSensitivity.scores`; sets `rankings`."""
        scores = super().scores(groups)
        weights, criterion = weights_of(self.model), importance.get("l2")
        self.rankings = [
            np.where(values > 0, criterion.score(group, weights), 0.0)
            for group, values in zip(groups, scores, strict=True)
        ]
        return scores

    def piece_scores(self, groups: Sequence[PruneGroup], piece: Batch) -> list[FloatArray]:
        """See `DataSensitivity.piece_scores`."""
        return [np.abs(slopes).mean(axis=0) for slopes in self.slopes(groups, piece)]
