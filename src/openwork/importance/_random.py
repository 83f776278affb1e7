"""Random scores: what any criterion has to beat."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from openwork.graph.groups import PruneGroup
from openwork.importance._base import ArraySource, FloatArray, GradientSource, Importance

__all__ = ["Random"]


class Random(Importance):
    """Uniform in [0, 1), fixed by the seed and the group's index, whatever the order of the calls.

    Args:
        seed: default 0.
    """

    name: ClassVar[str] = "random"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def score(self, group: PruneGroup, weights: ArraySource, gradients: GradientSource | None = None) -> FloatArray:
        """See `Importance.score`; neither weights nor gradients are read."""
        return np.random.default_rng((self.seed, group.index)).random(group.units)
