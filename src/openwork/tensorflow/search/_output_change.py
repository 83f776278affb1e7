"""The ground truth for small nets: silence each unit by itself and see how far the outputs move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from openwork.graph.groups import Member, PruneGroup
from openwork.importance import FloatArray
from openwork.tensorflow.feeds import Feed
from openwork.tensorflow.inference import InferenceCopy
from openwork.tensorflow.search._sensitivity import DataSensitivity

__all__ = ["OutputChangeSensitivity"]


class OutputChangeSensitivity(DataSensitivity):
    """Mean squared change of the outputs when what reads a unit's channels reads zero instead.

    One run for each unit and piece: minutes where the others take seconds. It is there to judge the others by.

    Args:
        piece: samples in a piece; None: whole feeds.
    """

    score_order = 2

    def prepare(self, groups: Sequence[PruneGroup]) -> None:
        """See `DataSensitivity.prepare`."""
        self._copy: InferenceCopy = self.search_graph.copy(self.output_nodes)

    def piece_scores(self, groups: Sequence[PruneGroup], piece: Feed) -> list[FloatArray]:
        """See `DataSensitivity.piece_scores`."""
        before = self._copy.run(self.output_nodes, piece)
        return [np.array([self._change(group, unit, piece, before) for unit in range(group.units)]) for group in groups]

    def _change(self, group: PruneGroup, unit: int, piece: Feed, before: Sequence[np.ndarray]) -> float:
        changed: dict[str, np.ndarray] = {}
        for member in group.consumers or group.members:
            name = f"{member.parameter}:0"
            weight = changed.get(name, self.search_graph.weights(member.parameter))
            changed[name] = silenced(member, unit, weight)
        after = self._copy.run(self.output_nodes, {**piece, **changed})
        return float(sum(np.square(new - old).mean(dtype=np.float64) for new, old in zip(after, before, strict=True)))


def silenced(member: Member, unit: int, weight: np.ndarray) -> np.ndarray:
    """A copy of the member's weight with zeros at the unit's positions."""
    result = weight.copy()
    for position in member.positions[member.units == unit].tolist():
        if member.blocks == 1:
            np.moveaxis(result, member.axis, 0)[position] = 0
        else:  # [.., inputs of a block, outputs]: the outputs of the block read the position
            block, inner = divmod(position, member.size // member.blocks)
            columns = result.shape[-1] // member.blocks
            np.moveaxis(result, member.axis, 0)[inner][..., block * columns : (block + 1) * columns] = 0
    return result
