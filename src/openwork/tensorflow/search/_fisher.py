"""Fisher sensitivity: the mean over samples of (dloss/dgate)^2, a gate standing where a channel is read.

dloss/dgate = sum of weight * gradient over the weights that read the unit. The samples of a feed are run one by one,
where the graph leaves the batch length open; a feed that cannot be cut counts as one sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork.errors import WeightsError
from openwork.graph.groups import PruneGroup
from openwork.importance import FloatArray
from openwork.retrain.sensitivity import readers_of
from openwork.tensorflow.feeds import Feed
from openwork.tensorflow.search._graph import Gradients
from openwork.tensorflow.search._sensitivity import DataSensitivity

__all__ = ["FisherSensitivity"]


class FisherSensitivity(DataSensitivity):
    """Mean over samples of the squared slope of the loss by each unit's gate.

    After Theis et al., "Faster gaze prediction with dense networks and Fisher pruning" (2018), and Liu et al., "Group
    Fisher Pruning for Practical Network Compression" (2021): the slopes of all layers that read a channel are summed
    before they are squared.

    Args:
        power: 2; 1 gives the mean absolute slope, a first-order score, and `score_order` is 1.
    """

    def __init__(self, power: float = 2.0) -> None:
        super().__init__(1)
        self.power = power
        self.score_order = 2 if power >= 2 else 1

    def prepare(self, groups: Sequence[PruneGroup]) -> None:
        """See `DataSensitivity.prepare`."""
        names = [member.parameter for group in groups for member in readers_of(group)]
        self._gradients: Gradients = self.search_graph.gradients(names)

    def piece_scores(self, groups: Sequence[PruneGroup], piece: Feed) -> list[FloatArray]:
        """See `DataSensitivity.piece_scores`."""
        found = self._gradients.at(piece)
        for name, gradient in found.items():
            if not np.isfinite(gradient.sum()) and not np.isfinite(gradient).all():
                raise WeightsError(f"gradient of {name} is NaN or infinite on input_data")
        return [np.abs(self.search_graph.gate_slopes(group, found)) ** self.power for group in groups]
