"""Put masks into a graph: before an optimizer is built, or after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from openwork.config import GradMode, NofMSetting
from openwork.errors import ConfigError, UnsupportedModelError
from openwork.graph.groups import IntArray, PruneGroup
from openwork.tensorflow.analysis import GraphAnalysis, Layer
from openwork.tensorflow.inserted.channels import alive_units, group_scope, weight_mask
from openwork.tensorflow.inserted.editing import helper_scope, read_of, redirect
from openwork.tensorflow.inserted.nm import nm_mask
from openwork.tensorflow.inserted.steps import Steps, masked_product
from openwork.tensorflow.variables import apply_operators, gradients

__all__ = ["Masks", "close_steps", "insert_masks", "weight_places"]


@dataclass(frozen=True, eq=False)
class Masks:
    """What is to be masked.

    Attributes:
        removed: units that go, by group.
        exact: groups of which exactly these units go; in the others the first training step ranks again.
        patterns: N:M settings of layers.
    """

    removed: Mapping[int, IntArray] = field(default_factory=dict)
    exact: frozenset[int] = frozenset()
    patterns: Mapping[str, NofMSetting] = field(default_factory=dict)


def weight_places(analysis: GraphAnalysis) -> dict[str, int]:
    """Which input of each layer's operator its weight is."""
    return {record.module: record.weight.place for record in analysis.trace.records if record.weight is not None}


class _Inserting:
    def __init__(self, graph: tf.Graph, analysis: GraphAnalysis, masks: Masks) -> None:
        self.graph, self.analysis, self.masks = graph, analysis, masks
        places = weight_places(analysis)
        self.groups = [analysis.groups[index] for index in masks.removed]
        masked = {member.parameter for group in self.groups for member in group.producers + group.consumers}
        self.layers: dict[str, list[Layer]] = {}  # by parameter
        for name, layer in analysis.layers.items():
            if layer.weight.name in masked or name in masks.patterns:
                self.layers.setdefault(layer.weight.name, []).append(layer)
        # Before anything is changed, so that a layer that cannot be masked leaves the graph as it was.
        self.reads = {
            name: list({read.name: read for read in (read_of(graph, x, places[x.op]) for x in layers)}.values())
            for name, layers in self.layers.items()
        }
        missing = masked - set(self.reads)
        self.unread = missing
        for name, setting in masks.patterns.items():
            self._check_pattern(analysis.layers[name], setting)

    def _check_pattern(self, layer: Layer, setting: NofMSetting) -> None:
        """Groups of a grouped convolution would lose different channels, each in another order."""
        blocks = [m.blocks for group in self.groups for m in group.consumers if m.parameter == layer.weight.name]
        if any(count > 1 for count in blocks):
            raise ConfigError(
                f"layer {layer.op!r} is a grouped convolution whose input channels are pruned; it cannot get a "
                f"{setting.n}:{setting.m} mask too. Skip it, or the layer that makes its inputs"
            )

    def run(self, steps: Steps) -> None:
        alive = self._alive(steps)
        full: dict[str, tf.Tensor] = {}
        decays: dict[str, float] = {}
        for parameter, reads in self.reads.items():
            layers = self.layers[parameter]
            scope = f"weights/{parameter}"
            with helper_scope(self.graph, scope):
                shape = reads[0].shape.as_list()
                mask = weight_mask(parameter, shape, self.groups, alive, reads[0].dtype.base_dtype)
            if mask is not None:
                full[parameter] = mask
                for number, read in enumerate(reads):
                    with helper_scope(self.graph, f"{scope}/read_{number}"):
                        reads[number] = masked_product(self.graph, read, mask)
                    redirect(read, reads[number])
            pattern = next((self.masks.patterns[x.op] for x in layers if x.op in self.masks.patterns), None)
            if pattern is not None:
                decays[parameter] = pattern.sr_ste_decay if pattern.grad_mode is GradMode.SR_STE else 0.0
                self._pattern(steps, layers[0], reads[0], pattern, alive, full, decays[parameter])
        self._hold_gradients(full, decays)

    def _alive(self, steps: Steps) -> dict[int, tf.Tensor]:
        alive = {}
        weights = {name: reads[0] for name, reads in self.reads.items()}
        for group in self.groups:
            fixed = group.index in self.masks.exact or any(m.parameter not in weights for m in group.producers)
            with helper_scope(self.graph, group_scope(group)):
                alive[group.index] = alive_units(steps, group, self.masks.removed[group.index], weights, fixed)
        return alive

    def _pattern(
        self,
        steps: Steps,
        layer: Layer,
        weight: tf.Tensor,
        pattern: NofMSetting,
        alive: Mapping[int, tf.Tensor],
        full: dict[str, tf.Tensor],
        decay: float,
    ) -> None:
        parameter = layer.weight.name
        with helper_scope(self.graph, f"patterns/{layer.op}"):
            order = _survivors_first(parameter, layer.in_axis, self.groups, alive)
            mask = nm_mask(steps, weight, layer.in_axis, pattern, order)
            product = masked_product(self.graph, weight, mask, decay)
            full[parameter] = full[parameter] * mask if parameter in full else mask
        redirect(weight, product)

    def _hold_gradients(self, full: Mapping[str, tf.Tensor], decays: Mapping[str, float]) -> None:
        """An optimizer that is there already: its gradients do not pass through the masks."""
        found = gradients(self.graph)
        for parameter, mask in full.items():
            for number, gradient in enumerate(found.get(parameter, ())):
                if gradient.indices is not None:
                    raise UnsupportedModelError(
                        f"{gradient.operator.type} {gradient.operator.name!r} updates rows of {parameter!r}; call this "
                        "before the optimizer is built"
                    )
                with helper_scope(self.graph, f"gradients/{parameter}/{number}"):
                    held = gradient.tensor * mask
                    if decays.get(parameter):
                        held = gradient.tensor + decays[parameter] * (1.0 - mask) * self.reads[parameter][0]
                gradient.operator._update_input(gradient.place, held)


def _survivors_first(
    parameter: str, axis: int, groups: Sequence[PruneGroup], alive: Mapping[int, tf.Tensor]
) -> tf.Tensor | None:
    """int32 [channels]: input channels that are alive, then the dead ones, both in their order."""
    members = [
        (group.index, member)
        for group in groups
        for member in group.consumers
        if member.parameter == parameter and member.axis == axis
    ]
    if not members:
        return None
    positions = np.zeros(members[0][1].size, np.int64)
    places, start = [tf.ones(1)], 1
    for index, member in members:
        positions[member.positions] = start + member.units
        places.append(alive[index])
        start += int(alive[index].shape[0])
    return tf.argsort(1.0 - tf.gather(tf.concat(places, 0), positions), stable=True)


def insert_masks(graph: tf.Graph, analysis: GraphAnalysis, masks: Masks) -> Steps:
    """Mask weights of a live graph.

    Args:
        graph: the graph; changed.
        analysis: of it.
        masks: what to mask.

    Returns:
        the training steps, with all variables that were made; `close_steps` is to follow.

    Raises:
        UnsupportedModelError: a weight is read where a mask cannot reach it; the graph is as it was.
        ConfigError: masks that exclude each other.
    """
    inserting = _Inserting(graph, analysis, masks)
    steps = Steps(graph)
    inserting.run(steps)
    return steps


def close_steps(graph: tf.Graph, steps: Steps) -> None:
    """Let training steps be counted and stored: the last thing to do, whatever was inserted."""
    commit = steps.finish()
    for operator in apply_operators(graph):
        operator._add_control_input(commit)
