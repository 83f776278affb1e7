"""Remove channels of a frozen graph with everything that depends on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from openwork.errors import ConfigError, ModelError, NothingToPruneError, nearest
from openwork.graph.groups import IntArray
from openwork.graph.plan import Plan
from openwork.retrain.ratio import check_share, lies_in, named_units, nothing_goes, paths_given, units_by_ratio
from openwork.tensorflow.analysis import GraphAnalysis, analyze_graph
from openwork.tensorflow.surgery import cut

__all__ = ["prune_graph"]


def prune_graph(
    graph_def: tf.compat.v1.GraphDef,
    outputs: Sequence[str],
    ratio: float = 0.5,
    round_to: int = 1,
    importance: Any = "balanced_l2",
    skip: Collection[str] = (),
    groups: Mapping[int, IntArray] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    analysis: GraphAnalysis | None = None,
) -> tuple[tf.compat.v1.GraphDef, Plan]:
    """Prune every group of channels that a weight produces.

    Args:
        graph_def: a frozen graph; not changed.
        outputs: names of its outputs.
        ratio: share of each group's units to remove, in (0, 1).
        round_to: kept channels are rounded up to a multiple of this where the group is large enough.
        importance: name of a criterion (`openwork.importance.names`), or an object with ``score(group, weights)``.
        skip: names of operators or scopes; a group with a producer in one of them is left alone.
        groups: instead of a ratio: which units of which group (``analyze_graph(...).groups``) go.
        sizes: shapes of placeholders, as for `analyze_graph`.
        analysis: what `analyze_graph` gave for this graph, so that it is not made again.

    Returns:
        The smaller graph, and the plan that made it.

    Raises:
        ConfigError: a bad argument.
        NothingToPruneError: no group may be pruned (says what is frozen).
        ModelError: the graph is not frozen, or inconsistent.
    """
    check_share(ratio, round_to)
    skip = paths_given(skip, groups)
    if analysis is None:
        analysis = analyze_graph(graph_def, outputs, sizes)
    elif not isinstance(analysis, GraphAnalysis):
        raise ConfigError(f"analysis is a {type(analysis).__name__}; what analyze_graph gives is needed")
    variable = next((source.name for source in analysis.sources.values() if source.kind != "const"), None)
    if variable is not None:
        raise ModelError(f"{variable!r} is a variable; freeze the graph before it is pruned")
    names = {node.name for node in analysis.graph_def.node}
    for path in skip:
        if path not in names and not any(name.startswith(path + "/") for name in names):
            raise ConfigError(f"skip: {path!r} is no operator or scope of the graph; {nearest(path, names)}")
    if groups is not None:
        chosen = named_units(analysis.groups, groups)
    else:
        chosen = units_by_ratio(
            analysis.groups, ratio, round_to, importance, analysis.weights, lambda group: lies_in(group, skip, "/")
        )
        if not chosen:
            raise NothingToPruneError(nothing_goes("the graph", analysis.groups, analysis.frozen))
    plan = Plan(analysis.plan(chosen))
    return cut(graph_def, analysis, plan), plan
