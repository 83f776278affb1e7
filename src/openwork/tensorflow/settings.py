"""What a config means for the layers of a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from openwork.config import TENSORFLOW_TYPES, LayerSetting, RetrainConfig, read_chosen_channels, resolve
from openwork.errors import ConfigError, nearest
from openwork.graph.groups import IntArray, PruneGroup
from openwork.graph.plan import Plan
from openwork.record import LayerKind
from openwork.retrain.choice import choose_units, report_choice, why_nothing_goes
from openwork.tensorflow.analysis import GraphAnalysis, Layer
from openwork.tensorflow.graphs import VARIABLES, node_name
from openwork.tensorflow.inserted.editing import BODIES
from openwork.tensorflow.rules import attribute

__all__ = ["chosen_units", "layer_kinds", "maskable_layers", "settings_of", "tell", "why_nothing"]

_LOG = logging.getLogger("openwork")
_PRUNABLE = ("Conv2D", "MatMul")
_MASKABLE = ("Conv2D", "MatMul", "Conv2DBackpropInput")
# Hold, name or bring a tensor; a layer to nobody.
_NO_LAYERS = VARIABLES | {"Const", "Identity", "NoOp", "Placeholder", "PlaceholderWithDefault", "ReadVariableOp"}
_FLOATS = (tf.float32, tf.float64)


def _is_depthwise(layer: Layer) -> bool:
    return layer.type.startswith("Depthwise") or (layer.groups == layer.cin and layer.groups > 1)


def maskable_layers(analysis: GraphAnalysis) -> dict[str, Layer]:
    """Layers whose weight can get an N:M mask or be quantised, by name."""
    return {
        name: layer
        for name, layer in analysis.layers.items()
        if layer.type in _MASKABLE and layer.weight.dtype in _FLOATS and not _is_depthwise(layer)
    }


def unusable_layers(analysis: GraphAnalysis) -> dict[str, str]:
    """Why layers of a type that masks are made for cannot get one, by name."""
    usable = maskable_layers(analysis)
    nodes = {node.name: node for node in analysis.graph_def.node}
    return {
        name: _why_unusable(analysis, nodes, name)
        for name, node in nodes.items()
        if node.op in _MASKABLE and name not in usable
    }


def _why_unusable(analysis: GraphAnalysis, nodes: Mapping[str, Any], name: str) -> str:
    layer = analysis.layers.get(name)
    if layer is not None:
        if layer.weight.dtype not in _FLOATS:
            return f"its weight is {layer.weight.dtype.name}; float32 or float64 is needed"
        return "it is a depthwise convolution"
    if attribute(nodes[name], "transpose_a", False):
        return "transpose_a is true"
    pending, seen = [node_name(nodes[name].input[1])], set()
    while pending:
        node = nodes[pending.pop()]
        if node.name in seen:
            continue
        seen.add(node.name)
        if node.op.startswith("Placeholder"):
            return f"its weight depends on placeholder {node.name!r}; a variable or constant is needed"
        pending += [node_name(tensor) for tensor in node.input if not tensor.startswith("^")]
    return "its weight is computed; it must be read from a variable or constant as it is"


def _refuse_unusable(config: RetrainConfig, reasons: Mapping[str, str]) -> None:
    for override in config.override_layer_configs:
        if override.name in reasons:
            raise ConfigError(
                f"{config.source}: override_layer_configs: {override.name!r} can be neither pruned nor quantised: "
                f"{reasons[override.name]}"
            )


def settings_of(config: RetrainConfig, analysis: GraphAnalysis) -> dict[str, LayerSetting]:
    """What the config says of every operator of the graph. Logs a skip that has no effect.

    Raises:
        ConfigError: it names what the graph has not, or asks for what a layer cannot do.
    """
    producers = {member.module for group in analysis.groups for member in group.producers}
    every = {node.name: node.op for node in analysis.graph_def.node}
    layers = {*analysis.layers, *producers, *(name for name, kind in every.items() if kind in _MASKABLE)}
    kinds = {name: kind for name, kind in every.items() if kind not in _NO_LAYERS or name in layers}
    maskable = maskable_layers(analysis)
    _refuse_unusable(config, unusable_layers(analysis))
    prunable = [name for name, layer in maskable.items() if layer.type in _PRUNABLE]
    settings = resolve(
        config,
        kinds,
        prunable=prunable,
        maskable=maskable,
        quantizable=maskable,
        prunable_on_request=[name for name in kinds if name in producers and name not in prunable],
        known_types=TENSORFLOW_TYPES,
        suggested=layers,
    )
    for field in ("skip_layers", "regular_prune_skip_layers", "quant_skip_layers"):
        for name in getattr(config, field):
            if name not in layers:
                close = nearest(name, layers)
                _LOG.warning("%s: %s %r is no layer; skipping it does nothing; %s", field, kinds[name], name, close)
    return settings


def owners_of(analysis: GraphAnalysis) -> Callable[[str, str], Sequence[str]]:
    """The layers that read a weight: all of them where several share it."""
    owners: dict[str, list[str]] = {}
    for name, layer in analysis.layers.items():
        owners.setdefault(layer.weight.name, []).append(name)
    return lambda parameter, module: owners.get(parameter, [module])


def chosen_units(
    analysis: GraphAnalysis,
    settings: Mapping[str, LayerSetting],
    text: str,
    weights: Callable[[str], np.ndarray],
    usable: Sequence[PruneGroup],
) -> tuple[dict[int, IntArray], set[int]]:
    """Units that a config removes, by group.

    Args:
        analysis: of the graph.
        settings: what the config says of each layer.
        text: the config; it may remember what a search chose.
        weights: arrays by parameter name.
        usable: the groups that may be pruned here.

    Returns:
        the units, and the groups whose units a search chose rather than a ranking of weights.
    """
    remembered = read_chosen_channels(text, {name: s.channels for name, s in settings.items()})
    for layer, why in remembered.stale.items():
        _LOG.warning("channels that a search chose for %s are not used: %s", layer, why)
    chosen = choose_units(usable, settings, remembered.removed, weights, owners_of(analysis))
    exact = {
        group.index
        for group in usable
        if group.index in chosen and any(member.module in remembered.removed for member in group.producers)
    }
    return chosen, exact


def why_nothing(analysis: GraphAnalysis, settings: Mapping[str, LayerSetting], source: Any) -> str:
    """Words for the error when a config leads to an empty plan."""
    text = why_nothing_goes(
        analysis.groups, settings, source, lambda module: module, lambda name: _why_kept(analysis, name)
    )
    for name, reason in list(unusable_layers(analysis).items())[:1]:
        text += f"; {name!r} cannot be used: {reason}"
    hidden = next((node for node in analysis.graph_def.node if node.op in BODIES), None)
    if hidden is not None:
        text += (
            f"; {hidden.op} {hidden.name!r} hides the layers inside it: build the graph after "
            "tf.compat.v1.disable_control_flow_v2()"
        )
    return text


def tell(analysis: GraphAnalysis, plan: Plan, settings: Mapping[str, LayerSetting]) -> None:
    """Log what each group loses, and why layers that the config asks for lose nothing."""
    produced = {member.module for group in analysis.groups for member in group.producers}
    report_choice(plan.groups, produced, settings, lambda name: _why_kept(analysis, name))


def _why_kept(analysis: GraphAnalysis, name: str) -> str:
    layer = analysis.layers.get(name)
    for frozen in analysis.frozen if layer is not None else ():
        if any(n == layer.weight.name and axis == layer.out_axis for n, axis, _ in frozen.members):  # type: ignore[union-attr]
            return frozen.reason
    return "no other layer reads them, or no output needs it"


def layer_kinds(analysis: GraphAnalysis) -> dict[str, LayerKind]:
    """What each operator with weights is to AMCT: its own type."""
    kinds = {name: LayerKind(layer.type, layer.groups) for name, layer in analysis.layers.items()}
    for record in analysis.trace.records:
        if record.name.startswith("FusedBatchNorm") or record.name == "BiasAdd":
            kinds.setdefault(record.module, LayerKind(record.name))
    return kinds
