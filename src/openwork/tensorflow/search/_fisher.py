"""Fisher sensitivity: the mean over samples of (dloss/dgate)^2, a gate standing where a channel is read."""

from __future__ import annotations

from collections.abc import Sequence

from openwork.graph.groups import PruneGroup
from openwork.importance import FloatArray
from openwork.tensorflow.feeds import Feed
from openwork.tensorflow.search._sensitivity import GateSensitivity

__all__ = ["FisherSensitivity"]


class FisherSensitivity(GateSensitivity):
    """Mean over samples of the squared slope of the loss by each unit's gate.

    After Theis et al., "Faster gaze prediction with dense networks and Fisher pruning" (2018), and Liu et al., "Group
    Fisher Pruning for Practical Network Compression" (2021): the slopes of all layers that read a channel are summed
    before they are squared.
    """

    score_order = 2

    def piece_scores(self, groups: Sequence[PruneGroup], piece: Feed) -> list[FloatArray]:
        """See `DataSensitivity.piece_scores`."""
        return [slopes**2 for slopes in self.slopes(groups, piece)]
