"""What a sensitivity sees of the model: `SearchGraph`, and the layers as AMCT's ``graph_info`` lists them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from openwork.graph.groups import CostTerm, PruneGroup
from openwork.search._records import GROUP, GraphInfo, get_attribute
from openwork.search.cost import BitOps

__all__ = ["SearchGraph", "graph_info", "layer_widths"]


@dataclass(frozen=True, eq=False)
class SearchGraph:
    """The first half of ``graph_tuple``.

    Attributes:
        model: the model; treat it as read-only.
        groups: the groups of the analysis, by index.
    """

    model: nn.Module
    groups: Sequence[PruneGroup]

    def group_of(self, record: Any) -> PruneGroup:
        """The group that a search record stands for."""
        return self.groups[get_attribute(record.producer[0], GROUP)]


def layer_widths(module: nn.Module) -> tuple[int, int] | None:
    """(input, output) channels of a convolution or linear layer; None for any other module."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.in_channels, module.out_channels
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return None


def graph_info(model: nn.Module, terms: Iterable[CostTerm], groups: Sequence[PruneGroup]) -> GraphInfo:
    """``{layer: {"cin", "cout", "ori_cout", "bitops"}}`` of every convolution and linear layer that runs.

    Whatever else makes channels (an embedding) is listed too, with no input channels and no cost, so that every
    producer of every record is found.
    """
    costs = BitOps(terms).by_layer([group.units for group in groups])
    info: GraphInfo = {}
    for name, module in model.named_modules():
        widths = layer_widths(module)
        if widths is not None and costs.get(name):
            info[name] = {"cin": widths[0], "cout": widths[1], "ori_cout": widths[1], "bitops": costs[name]}
    for group in groups:
        for member in group.producers:
            made = {"cin": 0, "cout": member.size, "ori_cout": member.size, "bitops": 0.0}
            info.setdefault(member.module, made)
    return info
