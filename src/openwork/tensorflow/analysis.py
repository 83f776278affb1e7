"""The answer for a TensorFlow graph: if a channel goes, what else must go with it, and what may not go at all?"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from openwork.errors import ConfigError, kind_of
from openwork.graph.costs import cost_terms
from openwork.graph.groups import CostTerm, Frozen, IntArray, PruneGroup
from openwork.graph.labels import LabelMap
from openwork.graph.plan import GroupCut, Plan, group_cut
from openwork.graph.settle import Settled, settle
from openwork.tensorflow.functions import inlined
from openwork.tensorflow.graphs import as_graph_def, bind, output_names
from openwork.tensorflow.helpers import without_helpers
from openwork.tensorflow.trace import Trace, WeightSource, trace
from openwork.tensorflow.values import constant_of

__all__ = ["GraphAnalysis", "Layer", "analyze_graph"]


@dataclass(frozen=True)
class Layer:
    """An operator that multiplies with a weight.

    Attributes:
        op: name of the operator; the layer's name in configs and records.
        type: its type.
        weight: where its weight comes from.
        out_axis, in_axis: axes of the weight; for a depthwise convolution both are the channel axis.
        cin, cout: channels that it reads and makes.
        groups: groups of a convolution.
    """

    op: str
    type: str
    weight: WeightSource
    out_axis: int
    in_axis: int
    cin: int
    cout: int
    groups: int = 1


@dataclass(eq=False)
class GraphAnalysis:
    """Dependencies of a graph's channels.

    Attributes:
        graph_def: the part of the graph that was analysed, placeholders bound.
        outputs: ``node:index``.
        trace: its labelled operators.
        settled: what came of the labels.
        sizes: the shapes of placeholders that were given.
    """

    graph_def: tf.compat.v1.GraphDef
    outputs: list[str]
    trace: Trace
    settled: Settled
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[PruneGroup, ...]:
        """Units that may be removed; members name a constant or variable operator and its axis."""
        return self.settled.groups

    @property
    def frozen(self) -> tuple[Frozen, ...]:
        return self.settled.frozen

    @property
    def labels(self) -> dict[str, LabelMap]:
        """Label map of each tensor, ``node:index``."""
        return self.trace.labels

    @property
    def sources(self) -> dict[str, WeightSource]:
        """Where each weight comes from, by the name that plans use."""
        return self.trace.sources

    @cached_property
    def layers(self) -> dict[str, Layer]:
        """Operators that multiply with a weight, by name."""
        found = {}
        for record in self.trace.records:
            use = record.weight
            if use is None or use.place not in record.parameters:
                continue
            weight = self.sources[record.parameters[use.place]]
            if use.out_axis == use.in_axis:  # depthwise
                cin = weight.shape[use.in_axis]
                cout = cin * weight.shape[-1]
            else:
                transposed = "Backprop" in record.name
                cin = weight.shape[use.in_axis] * (1 if transposed else use.groups)
                cout = weight.shape[use.out_axis] * (use.groups if transposed else 1)
            found[record.module] = Layer(
                record.module, record.name, weight, use.out_axis, use.in_axis, cin, cout, use.groups
            )
        return found

    @cached_property
    def params(self) -> int:
        """Elements of all weights that were read."""
        return sum(int(np.prod(self.sources[name].shape)) for name in self.trace.parameters)

    @property
    def macs(self) -> int:
        """Multiply-accumulates; of one sample where the batch length is unknown."""
        kept = np.array([group.units for group in self.groups], dtype=np.float64)
        return round(sum(term.value(kept) for term in self.costs if term.kind == "macs"))

    @cached_property
    def costs(self) -> list[CostTerm]:
        """What each operator, weight and result costs as a function of the units kept in each group."""
        return cost_terms(
            self.trace.records, self.trace.parameters, self.trace.store, self.settled, self.trace.bound.samples
        )

    def group_of(self, parameter: str, axis: int) -> PruneGroup | None:
        """The group that an axis of a weight belongs to, the first one if there are several."""
        for group in self.groups:
            if any(member.parameter == parameter and member.axis == axis for member in group.members):
                return group
        return None

    def weights(self, name: str) -> np.ndarray:
        """The value of a constant; half types as float32.

        Raises:
            ConfigError: it is a variable.
        """
        source = self.sources[name]
        if source.kind != "const":
            raise ConfigError(f"weight {name!r} is a variable; its value is in a session, not in the graph")
        value = constant_of(self._constants[name])
        return value.astype(np.float32) if source.dtype in (tf.float16, tf.bfloat16) else value

    @cached_property
    def _constants(self) -> dict[str, Any]:
        return {node.name: node for node in self.graph_def.node if node.op == "Const"}

    def plan(self, removed: Mapping[int, IntArray]) -> tuple[GroupCut, ...]:
        """The cuts when these units of these groups go."""
        return tuple(group_cut(self.groups[index], units) for index, units in sorted(removed.items()) if len(units))

    def consumed(self) -> set[tuple[str, int, int]]:
        """(weight, axis, blocks) of the axes that read channels."""
        pairs = zip(self.trace.store.owned, self.settled.consumed, strict=True)
        return {(axis.parameter, axis.axis, axis.blocks) for axis, reads in pairs if reads}

    def dead(self, plan: Plan) -> np.ndarray:
        """bool [labels]: labels that die with the plan's cuts."""
        owned = {(axis.parameter, axis.axis, axis.blocks): axis for axis in self.trace.store.owned}
        dead = np.zeros(len(self.settled.group_of), dtype=bool)
        for cut in plan.cuts:
            axis = owned.get((cut.parameter, cut.axis, cut.blocks))
            if axis is not None:
                dead[self.settled.component[axis.start + cut.removed]] = True
        return dead[self.settled.component]

    def freeze(self, tensors: Sequence[LabelMap], dead: np.ndarray, why: str) -> bool:
        """Never remove anything from the axes of these tensors on which something dies; the groups change.

        Args:
            tensors: label maps.
            dead: bool [labels], see `dead`.
            why: the reason, one line.

        Returns:
            False if nothing in them dies.
        """
        held = [e.labels.ravel() for tensor in tensors for e in tensor.entries if dead[e.labels].any()]
        store = self.trace.store
        store.location = ""
        for labels in held:
            store.freeze(labels, why)
        if held:
            self.settled = settle(store)
            self.__dict__.pop("costs", None)
        return bool(held)

    def __str__(self) -> str:
        from rich.console import Console

        from openwork.report.analysis import analysis_table

        stream = io.StringIO()
        Console(file=stream, width=118).print(analysis_table(self, "graph"))
        return stream.getvalue().rstrip()


def analyze_graph(
    graph: tf.Graph | tf.compat.v1.GraphDef,
    outputs: Sequence[str],
    sizes: Mapping[str, Sequence[int]] | None = None,
    layers: Mapping[str, str] | None = None,
) -> GraphAnalysis:
    """Find what depends on what in a graph, without its weights.

    Args:
        graph: a tf.Graph or GraphDef, frozen or with variables. It is not changed. Operators that openwork
            inserted (masks, 2:4 selection, fake quantisation) are looked through; in a GraphDef, the bodies of
            functions take the place of their calls.
        outputs: names of its output operators or tensors.
        sizes: shapes of placeholders, by name. Lengths that neither they nor the graph give are made up.
        layers: names of layers by weight, where they are not those of the operators that read it.

    Returns:
        The analysis.

    Raises:
        ConfigError: no graph, an output that is not in it, a shape that does not fit.
        ModelError: the graph is inconsistent.
    """
    graph_def = as_graph_def(graph)
    names = output_names(graph_def, outputs)
    if layers is not None and not isinstance(layers, Mapping):
        raise ConfigError(f"layers is {kind_of(layers)}; a dict is needed: {{weight: layer}}")
    plain = without_helpers(graph_def)
    if not isinstance(graph, tf.Graph):
        plain = inlined(plain)  # a live graph is edited where it is, so its operators keep their places
    bound = bind(plain, names, sizes)
    traced = trace(bound, layers or {})
    return GraphAnalysis(bound.graph_def, names, traced, settle(traced.store), dict(sizes or {}))
