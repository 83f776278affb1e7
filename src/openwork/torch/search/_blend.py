"""Fisher between layers, magnitude inside: which layers can spare channels, and which channels these are.

score = mean Fisher score of the group * (group-wise L2 magnitude / its mean over the group)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork import importance
from openwork.graph.groups import PruneGroup
from openwork.importance import FloatArray
from openwork.torch.prune import weights_of
from openwork.torch.search._fisher import FisherSensitivity

__all__ = ["FisherMagnitudeSensitivity"]


class FisherMagnitudeSensitivity(FisherSensitivity):
    """Fisher information says what a layer's channels are worth on average, L2 magnitude which are worth least.

    A few hundred samples tell layers apart well, single channels less so; after fine-tuning, what remains of a
    channel's weights counts for more than its slope on these samples.

    Args:
        piece: samples in a piece; None: whole batches.
    """

    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """See `DataSensitivity.scores`."""
        weights = weights_of(self.model)
        criterion = importance.get("l2")
        result = []
        for group, fisher in zip(groups, super().scores(groups), strict=True):
            magnitude = np.asarray(criterion.score(group, weights), dtype=np.float64)
            result.append(fisher.mean() * magnitude / (magnitude.mean() or 1.0))
        return result
