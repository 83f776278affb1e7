"""What a cost model answers: the whole cost for given widths, and what a change of one width gains."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

__all__ = ["CostModel", "CostState"]


class CostState(abc.ABC):
    """A cost model at one point, moved one group at a time; much cheaper than computing everything anew.

    Attributes:
        kept: units that each group keeps now.
        total: cost of the whole model now.
    """

    kept: list[int]
    total: float

    @abc.abstractmethod
    def gain(self, group: int, units: int) -> float:
        """By how much `total` would fall if `group` kept `units`; negative when it would rise."""

    def gains(self, group: int, units: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """`gain` for each of several numbers of units."""
        return np.array([self.gain(group, int(count)) for count in units], dtype=np.float64)

    @abc.abstractmethod
    def apply(self, group: int, units: int) -> None:
        """Let `group` keep `units` from now on."""


class CostModel(abc.ABC):
    """The cost of a model as a function of how many units each of its groups keeps.

    Attributes:
        name: what users write in the field ``cost``.
        unit: of the figures, for tables.
        staircase: True when one unit may gain nothing and several at once much (latency); searches then
            weigh jumps of any length, not only the next step.
    """

    name: ClassVar[str] = ""
    unit: ClassVar[str] = ""
    staircase: ClassVar[bool] = False

    @abc.abstractmethod
    def state(self, kept: Sequence[int]) -> CostState:
        """A state that starts at `kept` (units kept by each group, in the order of the analysis)."""

    @abc.abstractmethod
    def by_layer(self, kept: Sequence[int]) -> dict[str, float]:
        """The cost of each layer (module path), in the order in which the model runs them."""

    def total(self, kept: Sequence[int]) -> float:
        """The cost of the whole model."""
        return self.state(kept).total
