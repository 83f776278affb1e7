"""Sensitivity without data: the group-wise magnitude of the weights; and its product with Fisher information."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork import importance
from openwork.graph.groups import PruneGroup
from openwork.importance import FloatArray, Importance
from openwork.tensorflow.search._fisher import FisherSensitivity
from openwork.tensorflow.search._sensitivity import BuiltinSensitivity

__all__ = ["FisherMagnitudeSensitivity", "MagnitudeSensitivity"]


class MagnitudeSensitivity(BuiltinSensitivity):
    """L2 magnitude over producers and consumers, each divided by its mean over the layer.

    Args:
        criterion: another criterion of `openwork.importance` that needs no gradients, by name or object.
    """

    score_order = 0

    def __init__(self, criterion: str | Importance = "l2") -> None:
        self.criterion = importance.get(criterion)

    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """See `GroupSensitivity.scores`."""
        weights = self.search_graph.weights
        return [np.asarray(self.criterion.score(group, weights), dtype=np.float64) for group in groups]


class FisherMagnitudeSensitivity(FisherSensitivity):
    """Fisher information says what a layer's channels are worth on average, L2 magnitude which are worth least.

    score = mean Fisher score of the group * (group-wise L2 magnitude / its mean over the group)
    """

    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """See `DataSensitivity.scores`."""
        criterion = importance.get("l2")
        result = []
        for group, fisher in zip(groups, super().scores(groups), strict=True):
            magnitude = np.asarray(criterion.score(group, self.search_graph.weights), dtype=np.float64)
            result.append(fisher.mean() * magnitude / (magnitude.mean() or 1.0))
        return result
