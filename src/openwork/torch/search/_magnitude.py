"""Sensitivity without data: the group-wise magnitude of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork import importance
from openwork.graph.groups import PruneGroup
from openwork.importance import FloatArray, Importance
from openwork.torch.prune import weights_of
from openwork.torch.search._sensitivity import BuiltinSensitivity

__all__ = ["MagnitudeSensitivity"]


class MagnitudeSensitivity(BuiltinSensitivity):
    """L2 magnitude over producers and consumers, each divided by its mean over the layer.

    Args:
        criterion: another criterion of `openwork.importance` that needs no gradients, by name or object.
    """

    score_order = 0

    def __init__(self, criterion: str | Importance = "l2") -> None:
        self.criterion = importance.get(criterion)

    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """See `BuiltinSensitivity.scores`."""
        weights = weights_of(self.model)
        return [np.asarray(self.criterion.score(group, weights), dtype=np.float64) for group in groups]
