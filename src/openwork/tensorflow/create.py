"""create_prune_retrain_model: masks into a training or inference graph, and the record."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from openwork.config import LayerSetting, NofMSetting, RetrainConfig, load_retrain_config
from openwork.errors import NothingToPruneError, UnsupportedModelError
from openwork.files import check_paths, check_writable, read_text
from openwork.graph.groups import IntArray, PruneGroup
from openwork.graph.plan import Plan
from openwork.record import Record, SelectiveMaskRecord, save_record
from openwork.retrain.records import plan_records
from openwork.sparsity import nm_mask
from openwork.tensorflow.analysis import GraphAnalysis, Layer, analyze_graph
from openwork.tensorflow.inserted.apply import Masks, close_steps, insert_masks
from openwork.tensorflow.inserted.editing import check_editable, helpers_in, seen_by
from openwork.tensorflow.inserted.steps import Steps
from openwork.tensorflow.mixing import mixed_groups
from openwork.tensorflow.settings import (
    chosen_units,
    layer_kinds,
    maskable_layers,
    settings_of,
    tell,
    why_nothing,
)
from openwork.tensorflow.variables import Values, session_for

__all__ = ["Choice", "choose", "create_prune_retrain_model", "initialise", "masked_arrays", "weights_of"]

_LOG = logging.getLogger("openwork")


def create_prune_retrain_model(
    graph: tf.Graph,
    outputs: Sequence[str],
    record_file: str | os.PathLike[str],
    config_defination: str | os.PathLike[str],
) -> None:
    """Put channel masks or 2:4 selection into a graph, in place, and write the record.

    Call it on the training graph, best before the optimizer is built, and again with the same config on the
    inference graph; a Saver takes the masks from one to the other. Which channels go is decided in the first training
    step, from the weights as they are then, unless a search chose them. Masks change in training steps only.

    Call it before any session runs the graph: TensorFlow's sessions do not see changes of what they have run. If a
    default session of this graph is in force, that is checked, and its new variables are initialised.

    Args:
        graph: the graph; it is changed.
        outputs: names of its outputs, ``out`` or ``out:0``.
        record_file: path of the record to write. Its channels are those of the weights that can be seen now (those of
            the default session, else the initial ones); `save_prune_retrain_model` writes those in force.
        config_defination: path of an ``AMCTRetrainConfig`` in protobuf text format.

    Raises:
        ConfigError: the config or an output is wrong (names file, field, value and what is allowed).
        FileError: the config cannot be read or the record cannot be written.
        NothingToPruneError: nothing would be pruned; says why.
        UnsupportedModelError: no tf.Graph, finalized, masked already, a weight that a mask cannot reach, or the default
            session has run the graph before.
        ModelError: the graph is inconsistent.
    """
    check_paths(record_file=record_file, config_defination=config_defination)
    config = load_retrain_config(config_defination)
    graph = check_editable(graph)
    refuse_edited(graph)
    session_for(graph, None)  # a closed one is refused before the graph is changed
    check_writable(record_file, "record_file", config_defination)
    analysis = analyze_graph(graph, outputs)
    choice = choose(graph, analysis, config, config_defination)
    if not choice.plan.groups and not choice.patterns:
        raise NothingToPruneError(why_nothing(analysis, choice.settings, config_defination))
    steps = insert_masks(graph, analysis, choice.masks)
    close_steps(graph, steps)
    session = initialise(graph, steps)
    save_record(choice.record(graph, analysis, config_defination, session), record_file)


def refuse_edited(graph: tf.Graph) -> None:
    """Raise if a graph has been through create already.

    Raises:
        UnsupportedModelError: it carries operators of openwork.
    """
    found = helpers_in(graph)
    if found:
        raise UnsupportedModelError(
            f"graph carries operators of openwork already ({found[0]!r}); build it anew, or import an earlier one"
        )


def initialise(graph: tf.Graph, steps: Steps) -> tf.compat.v1.Session | None:
    """Give the new variables their first values in the default session, if it runs this graph.

    Returns:
        the session.

    Raises:
        UnsupportedModelError: it has run the graph before, so it does not see what was inserted.
    """
    session = session_for(graph, None)
    if session is not None:
        if not seen_by(graph, session):
            raise UnsupportedModelError(
                "the default session has run the graph before and does not see what was put into it now; call this "
                "before a session's first run, or go on in a new session (a Saver takes the variables along)"
            )
        session.run([variable.initializer for variable in steps.variables])
    return session


@dataclass(frozen=True, eq=False)
class Choice:
    """What a config does with a graph.

    Attributes:
        settings: what it says of each layer.
        plan: the channels that go, by the weights that can be seen now.
        masks: what is to be put into the graph.
        patterns: N:M settings of layers.
        weights: arrays by parameter name.
    """

    settings: Mapping[str, LayerSetting]
    plan: Plan
    masks: Masks
    patterns: Mapping[str, NofMSetting]
    weights: Callable[[str], np.ndarray]

    def record(
        self, graph: tf.Graph, analysis: GraphAnalysis, config_file: Any, session: tf.compat.v1.Session | None
    ) -> Record:
        """The record of it, by the weights of a session if there is one.

        Args:
            graph: the graph.
            analysis: of it.
            config_file: the config, which may remember what a search chose.
            session: a session that holds the weights; where it does not, initial values count.
        """
        plan, removed, weights = self.plan, self.masks.removed, self.weights
        if session is not None:
            weights = weights_of(analysis, Values(graph, session), self.settings)
            text = read_text(config_file, "config file")
            usable = [analysis.groups[index] for index in removed]
            removed, _ = chosen_units(analysis, self.settings, text, weights, usable)
            plan = Plan(analysis.plan(removed))
        selected = {
            name: SelectiveMaskRecord.of(name, mask)
            for name, mask in masked_arrays(analysis, self.patterns, removed, weights).items()
        }
        return Record(channels=plan_records(plan, layer_kinds(analysis)), masks=selected)


def choose(
    graph: tf.Graph, analysis: GraphAnalysis, config: RetrainConfig, config_file: str | os.PathLike[str]
) -> Choice:
    """What a config does with a graph; nothing is changed yet."""
    settings = settings_of(config, analysis)
    weights = weights_of(analysis, Values(graph), settings)
    usable = _maskable_groups(analysis)
    text = read_text(config_file, "config file")
    removed, exact = chosen_units(analysis, settings, text, weights, usable)
    plan = Plan(analysis.plan(removed))
    tell(analysis, plan, settings)
    patterns = _patterns(analysis, settings)
    return Choice(settings, plan, Masks(removed, frozenset(exact), patterns), patterns, weights)


def _maskable_groups(analysis: GraphAnalysis) -> list[PruneGroup]:
    """Groups whose masked weights mean the same as the cut ones while training.

    Where statistics or products of activations run across the channels, zeros would count.
    """
    mixed = mixed_groups(analysis)
    usable = []
    for group in analysis.groups:
        why = mixed.get(group.index)
        if why is None:
            usable.append(group)
        else:
            name = (group.producers or group.members)[0].module
            _LOG.info("%s keeps all its channels: %s runs across them, where masked channels would count", name, why)
    return usable


def shared_readers(analysis: GraphAnalysis) -> dict[str, set[str]]:
    """The operators that compute with each weight."""
    readers: dict[str, set[str]] = {}
    for record in analysis.trace.records:
        for place, name in record.parameters.items():
            if place not in record.values and record.name not in ("Identity", "ReadVariableOp"):
                readers.setdefault(name, set()).add(record.module)
    return readers


def _patterns(analysis: GraphAnalysis, settings: Mapping[str, LayerSetting]) -> dict[str, NofMSetting]:
    """The N:M settings of layers; those that cannot get one keep their weights, with a message."""
    readers = shared_readers(analysis)
    found = {}
    layers = maskable_layers(analysis)
    for name, setting in settings.items():
        if setting.mask is None:
            continue
        layer = layers[name]
        others = readers.get(layer.weight.name, set()) - {name}
        length = layer.weight.shape[layer.in_axis]
        if others:
            _LOG.info("%s gets no mask: its weight is shared with %s", name, min(others))
        elif length <= setting.mask.n:
            _LOG.info("%s gets no mask: %d input channels are no more than %d", name, length, setting.mask.n)
        else:
            if setting.mask.permute:
                _LOG.warning("%s: permute is not supported in graphs; the channels keep their order", name)
            found[name] = replace(setting.mask, permute=False)
    return found


def weights_of(
    analysis: GraphAnalysis, values: Values, settings: Mapping[str, LayerSetting] | None = None
) -> Callable[[str], np.ndarray]:
    """Arrays of weights by name: variables as `values` has them, constants from the graph.

    Args:
        analysis: of the graph.
        values: of its variables.
        settings: if given, only weights that it asks something of are read.
    """
    names = [name for name, source in analysis.sources.items() if source.kind != "const"]
    if settings is not None:
        asked = {name for name, setting in settings.items() if setting.prune is not None}
        needed = {analysis.layers[name].weight.name for name in asked if name in analysis.layers}
        for group in analysis.groups:
            if any(member.module in asked for member in group.producers):
                needed |= {member.parameter for member in group.members}
        names = [name for name in names if name in needed]
    found = values.read(names)

    def weights(name: str) -> np.ndarray:
        return found[name] if name in found else analysis.weights(name)

    return weights


def masked_arrays(
    analysis: GraphAnalysis,
    patterns: Mapping[str, NofMSetting],
    removed: Mapping[int, IntArray],
    weights: Callable[[str], np.ndarray],
) -> dict[str, np.ndarray]:
    """N:M masks of layers, of the shapes of their weights in the uncut graph."""
    result = {}
    for name, setting in patterns.items():
        layer = analysis.layers[name]
        order = _order(analysis, layer, removed)
        weight = np.take(weights(layer.weight.name), order, axis=layer.in_axis)
        weight = _dead_outputs_zero(analysis, layer, removed, weight)
        mask = nm_mask(np.ascontiguousarray(weight), setting.n, setting.m, layer.in_axis)
        result[name] = np.take(mask, np.argsort(order), axis=layer.in_axis)
    return result


def _dead(analysis: GraphAnalysis, layer: Layer, axis: int, removed: Mapping[int, IntArray]) -> np.ndarray:
    dead = np.zeros(layer.weight.shape[axis], dtype=bool)
    for index, units in removed.items():
        for member in analysis.groups[index].members:
            if (member.parameter, member.axis, member.blocks) == (layer.weight.name, axis, 1):
                dead[member.positions[np.isin(member.units, units)]] = True
    return dead


def _order(analysis: GraphAnalysis, layer: Layer, removed: Mapping[int, IntArray]) -> np.ndarray:
    return np.argsort(_dead(analysis, layer, layer.in_axis, removed), kind="stable")


def _dead_outputs_zero(
    analysis: GraphAnalysis, layer: Layer, removed: Mapping[int, IntArray], weight: np.ndarray
) -> np.ndarray:
    dead = np.sort(_dead(analysis, layer, layer.in_axis, removed))
    result = weight.copy()
    np.moveaxis(result, layer.in_axis, 0)[dead] = 0
    np.moveaxis(result, layer.out_axis, 0)[_dead(analysis, layer, layer.out_axis, removed)] = 0
    return result
