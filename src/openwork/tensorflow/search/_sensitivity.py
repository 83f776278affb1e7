"""What the built-in sensitivities for graphs share: feeds, pieces, the mean over them."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from openwork.errors import WeightsError
from openwork.graph.groups import PruneGroup
from openwork.importance import FloatArray
from openwork.retrain.sensitivity import GroupSensitivity, refuse_silence
from openwork.search._records import GraphInfo
from openwork.tensorflow.feeds import Feed, batch_length, pieces_of, read_feeds
from openwork.tensorflow.search._graph import Gradients, SearchGraph

__all__ = ["BuiltinSensitivity", "DataSensitivity", "GateSensitivity"]


class BuiltinSensitivity(GroupSensitivity):
    """Scores the units of a graph's groups and writes them to the records.

    Attributes:
        search_graph: the graph with its groups and weights; set by `auto_channel_prune_search`.
    """

    search_graph: SearchGraph

    def setup_initialization(
        self, graph_tuple: tuple[Any, GraphInfo], input_data: Any, test_iteration: int, output_nodes: Any = None
    ) -> None:
        """See `SensitivityBase.setup_initialization`."""
        self.graph_info = graph_tuple[1]
        self.graph = self.search_graph


class DataSensitivity(BuiltinSensitivity):
    """A sensitivity that needs calibration data.

    Args:
        piece: samples that are run at a time, where the graph leaves the batch length open; scores are averaged over
            the pieces of all feeds. None: whole feeds.
    """

    def __init__(self, piece: int | None = None) -> None:
        self.piece = piece
        self.feeds: list[Feed] = []
        self.output_nodes: list[str] = []

    def setup_initialization(
        self, graph_tuple: tuple[Any, GraphInfo], input_data: Any, test_iteration: int, output_nodes: Any = None
    ) -> None:
        """See `SensitivityBase.setup_initialization`.

        Raises:
            ConfigError: `input_data` is no list of feed_dicts that fit, or too short.
        """
        super().setup_initialization(graph_tuple, input_data, test_iteration, output_nodes)
        self.feeds = read_feeds(self.search_graph.graph, input_data, test_iteration)
        self.output_nodes = list(output_nodes or self.search_graph.analysis.outputs)

    def pieces(self) -> list[Feed]:
        """The pieces of all feeds."""
        graph = self.search_graph.graph
        return [
            piece
            for feed in self.feeds
            for piece in pieces_of(graph, feed, self.piece or max(1, batch_length(graph, feed)))
        ]

    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """See `GroupSensitivity.scores`.

        Raises:
            WeightsError: a gradient is NaN or infinite, or nothing reaches a layer.
            ModelError: the graph fails on the data.
        """
        self.prepare(groups)
        totals = [np.zeros(group.units) for group in groups]
        pieces = self.pieces()
        for number, piece in enumerate(pieces):
            for total, scores in zip(totals, self.piece_scores(groups, piece), strict=True):
                total += scores
            if self.progress is not None:
                self.progress((number + 1) / len(pieces))
        totals = [total / len(pieces) for total in totals]
        refuse_silence(groups, totals)
        return totals

    @abc.abstractmethod
    def prepare(self, groups: Sequence[PruneGroup]) -> None:
        """Build what `piece_scores` runs."""

    @abc.abstractmethod
    def piece_scores(self, groups: Sequence[PruneGroup], piece: Feed) -> list[FloatArray]:
        """Scores on one piece of the data; they are averaged over all pieces."""


class GateSensitivity(DataSensitivity):
    """A sensitivity made of the slopes of the loss by gates on the units where they are read.

    A slope is the sum of weight * gradient over the weights that read the unit. The samples of a feed are run one by
    one, where the graph leaves the batch length open; a feed that cannot be cut counts as one sample.
    """

    def __init__(self) -> None:
        super().__init__(1)

    def prepare(self, groups: Sequence[PruneGroup]) -> None:
        """See `DataSensitivity.prepare`."""
        # Those of all members, not only of what reads: a NaN anywhere in the group is to be found here.
        names = [member.parameter for group in groups for member in group.members]
        self._gradients: Gradients = self.search_graph.gradients(names)

    def slopes(self, groups: Sequence[PruneGroup], piece: Feed) -> list[FloatArray]:
        """float64 [units] for each group.

        Raises:
            WeightsError: a gradient is NaN or infinite; the variable is named.
        """
        found = self._gradients.at(piece)
        for name, gradient in found.items():
            if not np.isfinite(gradient.sum()) and not np.isfinite(gradient).all():
                raise WeightsError(f"gradient of {name} is NaN or infinite on input_data")
        return [self.search_graph.gate_slopes(group, found) for group in groups]
