"""What the built-in sensitivities of all frameworks share: units are scored, records get channels."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from openwork.errors import WeightsError
from openwork.graph.groups import Member, PruneGroup
from openwork.importance import FloatArray
from openwork.search import SensitivityBase, set_attribute
from openwork.search._records import GraphInfo, shown_member, spread

__all__ = ["GroupSensitivity", "readers_of", "refuse_silence"]


class GroupSensitivity(SensitivityBase):
    """Scores the units of groups and writes them to the records.

    Attributes:
        graph: the first half of ``graph_tuple``; its ``group_of(record)`` gives the group of a record.
        progress: called with the share of the work that is done; set by `auto_channel_prune_search`.
    """

    graph: Any
    graph_info: GraphInfo
    progress: Callable[[float], None] | None = None

    def setup_initialization(
        self, graph_tuple: tuple[Any, GraphInfo], input_data: Any, test_iteration: int, output_nodes: Any = None
    ) -> None:
        """See `SensitivityBase.setup_initialization`."""
        self.graph, self.graph_info = graph_tuple

    def get_sensitivity(self, search_records: Sequence[Any]) -> None:
        """See `SensitivityBase.get_sensitivity`."""
        groups = [self.graph.group_of(record) for record in search_records]
        for record, group, scores in zip(search_records, groups, self.scores(groups), strict=True):
            set_attribute(record.producer[0], "sensitivity", spread(group, scores))

    @abc.abstractmethod
    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """What is lost with each unit: float64 [units] for each group."""


def readers_of(group: PruneGroup) -> tuple[Member, ...]:
    """The members that read the channels; where none does, those that make them.

    The sum of weight * gradient over all of them is the slope of the loss by a gate on the channel.
    """
    return group.consumers or group.producers or group.members


def refuse_silence(groups: Sequence[PruneGroup], totals: Sequence[FloatArray]) -> None:
    """Raise if all scores of a group are 0.

    Raises:
        WeightsError: no gradient reaches the layer; it is named.
    """
    for group, total in zip(groups, totals, strict=True):
        if not total.any():
            raise WeightsError(
                f"layer {shown_member(group).module!r}: the sensitivity of all its {group.units} channels is 0 "
                "on input_data; no gradient reaches it. Give other data, or skip the layer "
                "(regular_prune_skip_layers in the file that override_prune_cfg names)"
            )
