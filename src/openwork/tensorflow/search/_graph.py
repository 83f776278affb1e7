"""What the built-in sensitivities see of a graph, and the layers as AMCT's ``graph_info`` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from openwork.errors import ConfigError
from openwork.graph.groups import CostTerm, PruneGroup
from openwork.importance import FloatArray
from openwork.importance._base import channel_sums, unit_sums
from openwork.retrain.sensitivity import readers_of
from openwork.search._records import GROUP, GraphInfo, get_attribute
from openwork.search.cost import BitOps
from openwork.tensorflow.analysis import GraphAnalysis
from openwork.tensorflow.feeds import Feed
from openwork.tensorflow.inference import InferenceCopy, variables_behind
from openwork.tensorflow.variables import Values, gradients

__all__ = ["SearchGraph", "graph_info"]


@dataclass(eq=False)
class SearchGraph:
    """A training graph with the values of its variables.

    Attributes:
        graph: the graph; treat it as read-only.
        analysis: of it.
        weights: arrays by parameter name.
        values: of the variables.
    """

    graph: tf.Graph
    analysis: GraphAnalysis
    weights: Callable[[str], np.ndarray]
    values: Values

    @property
    def groups(self) -> Sequence[PruneGroup]:
        """The groups of the analysis, by index."""
        return self.analysis.groups

    def group_of(self, record: Any) -> PruneGroup:
        """The group that a search record stands for."""
        return self.groups[get_attribute(record.producer[0], GROUP)]

    def gate_slopes(self, group: PruneGroup, found: Mapping[str, np.ndarray]) -> FloatArray:
        """Slope of the loss by a gate where each unit is read, from gradients by parameter name: float64 [units]."""
        slopes = np.zeros(group.units)
        for member in readers_of(group):
            if member.parameter in found:
                product = self.weights(member.parameter) * found[member.parameter]
                slopes += unit_sums(member, channel_sums(member, product), group.units)
        return slopes

    def copy(self, outputs: Sequence[str]) -> InferenceCopy:
        """A copy in which these tensors can be computed without changing anything."""
        graph_def = self.graph.as_graph_def()
        return InferenceCopy(graph_def, outputs, self.values.read(variables_behind(graph_def, outputs)))

    def gradients(self, parameters: Iterable[str]) -> Gradients:
        """The gradients of parameters, as their optimizer sees them.

        Raises:
            ConfigError: the graph has no optimizer.
        """
        found = gradients(self.graph)
        if not found:
            raise ConfigError(
                "graph has no optimizer operator (ApplyMomentum, ResourceApplyAdam or the like), so no gradients; "
                "build them first, e.g. tf.compat.v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)"
            )
        wanted = {name: found[name][0] for name in dict.fromkeys(parameters) if name in found}
        tensors = {name: (g.tensor.name, None if g.indices is None else g.indices.name) for name, g in wanted.items()}
        names = [name for pair in tensors.values() for name in pair if name is not None]
        shapes = {name: self.analysis.sources[name].shape for name in tensors}
        return Gradients(self.copy(names), tensors, shapes)


@dataclass(eq=False)
class Gradients:
    """Computes gradients by parameter name."""

    copy: InferenceCopy
    tensors: Mapping[str, tuple[str, str | None]]
    shapes: Mapping[str, tuple[int, ...]]

    def at(self, feed: Feed) -> dict[str, np.ndarray]:
        """The gradients on one feed; sparse ones as full arrays.

        Raises:
            ModelError: the graph fails on the feed.
        """
        names = list(dict.fromkeys(name for pair in self.tensors.values() for name in pair if name is not None))
        values = dict(zip(names, self.copy.run(names, feed), strict=True))
        result = {}
        for name, (tensor, indices) in self.tensors.items():
            if indices is None:
                result[name] = values[tensor]
            else:
                result[name] = np.zeros(self.shapes[name], values[tensor].dtype)
                np.add.at(result[name], values[indices], values[tensor])
        return result


def graph_info(analysis: GraphAnalysis, terms: Iterable[CostTerm]) -> GraphInfo:
    """``{layer: {"cin", "cout", "ori_cout", "bitops"}}`` of every layer, and of whatever else makes channels."""
    costs = BitOps(terms).by_layer([group.units for group in analysis.groups])
    info: GraphInfo = {
        name: {"cin": layer.cin, "cout": layer.cout, "ori_cout": layer.cout, "bitops": costs[name]}
        for name, layer in analysis.layers.items()
        if costs.get(name)
    }
    for group in analysis.groups:
        for member in group.producers:
            made = {"cin": 0, "cout": member.size, "ori_cout": member.size, "bitops": 0.0}
            info.setdefault(member.module, made)
    return info
