"""auto_channel_prune_search: from a training graph, data and a target to the config that prunes it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from openwork.config import Cost, LayerSetting, RetrainConfig, load_auto_prune_config
from openwork.errors import wrong_model
from openwork.retrain.progress import shown_progress, timed
from openwork.retrain.search import Subject, check_outputs, find_sensitivity, per_sample, publish, run_search
from openwork.search import SearchChannelBase, SensitivityBase, get_algorithm
from openwork.search.cost import CostModel, from_terms
from openwork.tensorflow.analysis import GraphAnalysis, analyze_graph
from openwork.tensorflow.create import weights_of
from openwork.tensorflow.feeds import Feed, batch_length, read_feeds
from openwork.tensorflow.mixing import mixed_groups
from openwork.tensorflow.search._graph import SearchGraph, graph_info
from openwork.tensorflow.search._latency import latency_cost
from openwork.tensorflow.search._sensitivity import BuiltinSensitivity
from openwork.tensorflow.settings import settings_of
from openwork.tensorflow.variables import Values, session_for

__all__ = ["auto_channel_prune_search", "get_sensitivity"]

_SENSITIVITIES = {
    "FisherMagnitudeSensitivity": "openwork.tensorflow.search._magnitude",
    "FisherSensitivity": "openwork.tensorflow.search._fisher",
    "MagnitudeSensitivity": "openwork.tensorflow.search._magnitude",
    "OutputChangeSensitivity": "openwork.tensorflow.search._output_change",
    "TaylorLossSensitivity": "openwork.tensorflow.search._taylor",
}


def get_sensitivity(sensitivity: str | type[SensitivityBase] | SensitivityBase) -> SensitivityBase:
    """The sensitivity of that name; a class is instantiated, an object is returned as it is.

    Raises:
        ConfigError: no sensitivity has that name, or the object lacks a method.
    """
    return find_sensitivity(sensitivity, _SENSITIVITIES)


def auto_channel_prune_search(
    graph: tf.Graph,
    output_nodes: Sequence[str],
    config: str | os.PathLike[str],
    input_data: Sequence[Mapping[Any, Any]],
    output_cfg: str | os.PathLike[str],
    sensitivity: str | SensitivityBase | type[SensitivityBase] = "TaylorLossSensitivity",
    search_alg: str | SearchChannelBase | type[SearchChannelBase] = "GreedySearch",
    *,
    session: tf.compat.v1.Session | None = None,
) -> None:
    """Find which channels to remove for a given budget, and write the config that removes them.

    The config goes to `output_cfg`, for `create_prune_retrain_model`; ``report.html`` goes beside it. Everything is
    measured on a copy of the graph in which batch norms and dropout behave as in inference and nothing is updated.

    Args:
        graph: the training graph, with an optimizer in it; it is not changed. The gradient of a weight is what its
            optimizer's operator gets, whatever was done to it (clipping, scaling, L2 terms).
        output_nodes: names of the network's outputs, ``out`` or ``out:0``.
        config: path of an ``AutoChannelPruneConfig`` in protobuf text format.
        input_data: list of feed_dicts, e.g. ``[{"image:0": images, "label:0": labels}]``; ``test_iteration`` of them
            are used. Switches such as ``is_training`` are fed too, as in inference.
        output_cfg: path of the config to write.
        sensitivity: ``TaylorLossSensitivity``, ``FisherSensitivity``, ``FisherMagnitudeSensitivity``,
            ``MagnitudeSensitivity``, ``OutputChangeSensitivity``, or an object or class with `SensitivityBase`'s
            methods.
        search_alg: ``GreedySearch``, ``DynamicProgrammingSearch``, or an object or class with `SearchChannelBase`'s
            methods.
        session: the session that holds the variables; None: the default session if it runs this graph, else initial
            values. The variables are read only.

    Raises:
        ConfigError: config, data, outputs, session, sensitivity or algorithm are wrong, or the graph has no gradients.
        FileError: a file is missing or cannot be written (found before the work).
        NothingToPruneError: nothing is left to search; says why.
        WeightsError: a gradient is NaN, or none reaches a layer (named).
        ModelError: the graph fails on the data, or is inconsistent.
        UnsupportedModelError: `graph` is no tf.Graph.
    """
    settings = load_auto_prune_config(config)
    scorer, algorithm = get_sensitivity(sensitivity), get_algorithm(search_alg)
    if not isinstance(graph, tf.Graph):
        raise wrong_model("graph", graph, "a tf.Graph")
    holder = session_for(graph, session)
    feeds = read_feeds(graph, input_data, settings.test_iteration)
    check_outputs(config, output_cfg)
    seconds: dict[str, float] = {}
    with timed(seconds, "analysis"):
        sizes = _open_sizes(graph, feeds[0])
        analysis = analyze_graph(graph, output_nodes, sizes)
        values = Values(graph, holder, session is not None)
        subject = _subject(graph, analysis, values, batch_length(graph, feeds[0]) if sizes else 1)
    if isinstance(scorer, BuiltinSensitivity):
        scorer.search_graph = SearchGraph(graph, analysis, subject.weights, values)
    with timed(seconds, "cost"), shown_progress("latency of layers", settings.cost is Cost.LATENCY) as bar:
        if settings.cost is Cost.LATENCY:
            cost: CostModel = latency_cost(analysis, bar)
        else:
            cost = from_terms(settings.cost.value.lower(), subject.terms)
    found = run_search(subject, settings, cost, input_data, scorer, algorithm, seconds, analysis.outputs)
    publish(found, settings, output_cfg)


def _open_sizes(graph: tf.Graph, feed: Feed) -> dict[str, tuple[int, ...]]:
    """Shapes of fed placeholders whose lengths, but for the batch's, the graph leaves open."""
    sizes = {}
    for name, array in feed.items():
        tensor = graph.get_tensor_by_name(name)
        stated = tensor.shape
        if tensor.op.type.startswith("Placeholder") and stated.rank and None in stated.as_list()[1:]:
            sizes[tensor.op.name] = array.shape
    return sizes


def _subject(graph: tf.Graph, analysis: GraphAnalysis, values: Values, samples: int) -> Subject:
    """The graph as the search sees it."""
    weights = weights_of(analysis, values)
    terms = per_sample(analysis.costs, samples)
    mixed = mixed_groups(analysis)

    def settings(config: RetrainConfig) -> dict[str, LayerSetting]:
        found = settings_of(config, analysis)
        for group in analysis.groups:
            for member in group.producers if group.index in mixed else ():
                if member.module in found:
                    why = f"{mixed[group.index]} runs across its channels, where masked ones would count"
                    found[member.module] = replace(found[member.module], prune=None, reason=why)
        return found

    return Subject(
        name="graph",
        groups=analysis.groups,
        frozen=analysis.frozen,
        settings=settings,
        weights=weights,
        order=[record.module for record in analysis.trace.records],
        types={name: layer.type for name, layer in analysis.layers.items()},
        graph=graph,
        info=graph_info(analysis, terms),
        terms=terms,
    )
