"""What the built-in sensitivities share: batches, pieces, the sum over processes, writing to the records."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from openwork.graph.groups import PruneGroup
from openwork.importance import FloatArray
from openwork.retrain.sensitivity import GroupSensitivity, refuse_silence
from openwork.search._records import GraphInfo
from openwork.torch.search._batches import Batch, device_of, read_batches
from openwork.torch.search._distributed import rank_and_size, sum_over_ranks
from openwork.torch.search._graph import SearchGraph
from openwork.torch.search._loss import LossFunction

__all__ = ["BuiltinSensitivity", "DataSensitivity"]


class BuiltinSensitivity(GroupSensitivity):
    """Scores the units of groups of a torch model and writes them to the records."""

    graph: SearchGraph

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.graph.model


class DataSensitivity(BuiltinSensitivity):
    """A sensitivity that needs calibration data; the loss can be replaced.

    Args:
        piece: samples that are run at a time; scores are averaged over the pieces of all batches. None: each
            batch is cut into `pieces_per_batch`, or more where there are more processes than pieces.
    """

    pieces_per_batch: int = 1

    def __init__(self, piece: int | None = None) -> None:
        self.piece = piece
        self.loss_function: LossFunction | None = None
        self.batches: list[Batch] = []

    def set_loss_func(self, loss_func: LossFunction) -> None:
        """Use ``loss_func(output, label)``, which returns a tensor, in place of the default.

        The default is cross-entropy where labels are class indices, else the mean absolute difference.
        """
        self.loss_function = loss_func

    def setup_initialization(
        self, graph_tuple: tuple[Any, GraphInfo], input_data: Any, test_iteration: int, output_nodes: Any = None
    ) -> None:
        """See `SensitivityBase.setup_initialization`.

        Raises:
            ConfigError: the data is of a wrong kind or holds fewer than `test_iteration` batches.
        """
        super().setup_initialization(graph_tuple, input_data, test_iteration, output_nodes)
        self.batches = read_batches(input_data, test_iteration, device_of(self.model))

    def pieces(self) -> tuple[list[Batch], int]:
        """This process's share of the pieces, and their number over all processes."""
        rank, size = rank_and_size()
        count = max(self.pieces_per_batch, -(-size // max(1, len(self.batches))))
        pieces = []
        for batch in self.batches:
            pieces += batch.split(self.piece or max(1, -(-batch.samples // count)))
        return pieces[rank::size], len(pieces)

    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """See `BuiltinSensitivity.scores`.

        Raises:
            WeightsError: a gradient is NaN or infinite, or nothing reaches a layer.
        """
        totals = [np.zeros(group.units) for group in groups]
        mine, count = self.pieces()
        for number, piece in enumerate(mine):
            for total, scores in zip(totals, self.piece_scores(groups, piece), strict=True):
                total += scores
            if self.progress is not None:
                self.progress((number + 1) / len(mine))
        totals = [total / count for total in sum_over_ranks(totals, device_of(self.model))]
        refuse_silence(groups, totals)
        return totals

    @abc.abstractmethod
    def piece_scores(self, groups: Sequence[PruneGroup], piece: Batch) -> list[FloatArray]:
        """Scores on one piece of the data; they are averaged over all pieces."""
