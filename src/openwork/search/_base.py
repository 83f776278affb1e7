"""The two things that users may replace: how channels are scored, and how they are chosen.

Method names, argument order and structures are those of AMCT, so a class written for it runs here.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from openwork.importance import FloatArray
from openwork.search._problem import SearchProblem, Solution
from openwork.search._records import GraphInfo, refresh_gains

__all__ = ["SearchChannelBase", "SensitivityBase"]


class SensitivityBase(abc.ABC):
    """Scores channels: what is lost with each.

    Attributes:
        score_order: 0 when scores are sizes of weights, which know nothing of the loss, 1 when they are sizes of
            slopes of the loss (|weight * gradient|), 2 when they are losses or squares of slopes. The built-in
            algorithms square the first two, and prune more evenly by the first.
        rankings: after `get_sensitivity`, None, or one array for each record: float64 [units of the group]. Then
            scores say how many channels of a layer go, and the units with the lowest ranks are those that go.
    """

    score_order: int = 1
    rankings: Sequence[FloatArray] | None = None

    @abc.abstractmethod
    def setup_initialization(
        self, graph_tuple: tuple[Any, GraphInfo], input_data: Any, test_iteration: int, output_nodes: Any = None
    ) -> None:
        """Take what is needed before scores are asked for.

        Args:
            graph_tuple: ``(graph, graph_info)``. ``graph.model`` is the model, ``graph.groups`` the groups of
                the analysis by the index that a record's ``producer[0]`` names in ``openwork_group`` (TensorFlow:
                ``graph`` is the tf.Graph); ``graph_info`` is ``{layer: {"cin", "cout", "ori_cout", "bitops"}}``.
            input_data: the calibration data, as the caller gave it.
            test_iteration: number of batches to average over.
            output_nodes: names of the graph's outputs (TensorFlow only).
        """

    @abc.abstractmethod
    def get_sensitivity(self, search_records: Sequence[Any]) -> None:
        """Set the attribute ``sensitivity`` on ``record.producer[0]`` of every record.

        It is a FLOATS attribute with one value for each channel of the range ``begin`` to ``end``.
        """


class SearchChannelBase(abc.ABC):
    """Chooses the channels that go.

    Attributes:
        problem: the full problem (groups, permitted widths, exact cost model, target), set by
            `auto_channel_prune_search` before it calls `channel_prune_search`; None when called by hand.
        solution: what was found, for the report, if the algorithm sets it.
    """

    problem: SearchProblem | None = None
    solution: Solution | None = None

    @abc.abstractmethod
    def channel_prune_search(
        self,
        graph_info: GraphInfo,
        search_records: Sequence[Any],
        prune_config: tuple[float, bool, float],
    ) -> dict[str, list[int]]:
        """Choose.

        Args:
            graph_info: ``{layer: {"cin", "cout", "ori_cout", "bitops"}}``.
            search_records: one record for each group, with ``sensitivity`` and ``bitops`` on ``producer[0]``.
            prune_config: ``(compress_ratio, ascend_optimized, max_prune_ratio)``.

        Returns:
            for each producer a list with one number for each of its channels: 1 it stays, 0 it goes.
        """

    def update_graph(
        self, prune_channel_num: Mapping[int, int], graph_info: GraphInfo, search_records: Sequence[Any]
    ) -> None:
        """Take removed channels into account: widths and bit operations of layers, gains of records.

        Args:
            prune_channel_num: index of a record -> number of channels removed from it.
            graph_info: changed in place (``cin``, ``cout``, ``bitops``).
            search_records: changed in place (``bitops`` of ``producer[0]``).
        """
        for index, count in prune_channel_num.items():
            record = search_records[index]
            for nodes, side in ((record.producer, "cout"), (record.consumer, "cin")):
                for node in nodes:
                    info = graph_info.get(node.name)
                    if info and info.get(side):
                        info["bitops"] *= (info[side] - count) / info[side]
                        info[side] -= count
        refresh_gains(graph_info, search_records)
