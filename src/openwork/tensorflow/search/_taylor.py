"""First-order Taylor sensitivity: |sum of weight * gradient| of each unit in each variable, summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from openwork import importance
from openwork.graph.groups import PruneGroup
from openwork.importance import FloatArray
from openwork.tensorflow.feeds import Feed
from openwork.tensorflow.search._graph import Gradients
from openwork.tensorflow.search._sensitivity import DataSensitivity

__all__ = ["TaylorLossSensitivity"]


class TaylorLossSensitivity(DataSensitivity):
    """|w.g| per channel, summed over all variables of the group, averaged over pieces of the feeds.

    After Molchanov et al., "Importance Estimation for Neural Network Pruning" (2019). Small pieces, because in the
    gradient of a large batch the samples of a well-trained net cancel each other.

    Which channels of a layer go, `rankings`, is the mean square of the slope by a gate where the channel is read, from
    the same gradients: the sum over variables tells layers apart, single channels less so.

    Args:
        piece: samples in a piece; None: each feed is cut into 32.
    """

    pieces_per_feed: ClassVar[int] = 32
    criterion: ClassVar[str] = "taylor"

    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """See `DataSensitivity.scores`; sets `rankings`."""
        self._squares = [np.zeros(group.units) for group in groups]
        scores = super().scores(groups)
        self.rankings = self._squares
        return scores

    def prepare(self, groups: Sequence[PruneGroup]) -> None:
        """See `DataSensitivity.prepare`."""
        names = [member.parameter for group in groups for member in group.members]
        self._gradients: Gradients = self.search_graph.gradients(names)

    def piece_scores(self, groups: Sequence[PruneGroup], piece: Feed) -> list[FloatArray]:
        """See `DataSensitivity.piece_scores`."""
        found = self._gradients.at(piece)
        for squares, group in zip(self._squares, groups, strict=True):
            squares += self.search_graph.gate_slopes(group, found) ** 2
        criterion = importance.get(self.criterion)
        return [criterion.score(group, self.search_graph.weights, found.get) for group in groups]
