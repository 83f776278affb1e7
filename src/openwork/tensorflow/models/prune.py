"""Prune Keras models: analysis, a really smaller trainable model, masked equivalence."""

from __future__ import annotations

import io
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from openwork.errors import ConfigError, ModelError, NothingToPruneError, RecordError, nearest
from openwork.graph.groups import CostTerm, Frozen, IntArray, PruneGroup
from openwork.graph.labels import RIGID
from openwork.graph.plan import Plan, Repair, given_plan
from openwork.retrain.ratio import check_share, lies_in, named_units, nothing_goes, paths_given, units_by_ratio
from openwork.tensorflow.analysis import GraphAnalysis, analyze_graph
from openwork.tensorflow.graphs import BATCH
from openwork.tensorflow.models.copying import copy_model, is_functional
from openwork.tensorflow.models.plans import PrunePlan, rebuilt, warn_of_config
from openwork.tensorflow.models.shrinking import candidates, first_difference, set_attribute, shrink, state_reshapes
from openwork.tensorflow.models.tracing import (
    Traced,
    check_model,
    feeds_of,
    frozen_graph,
    names_in_copy,
    signature_of,
    trace_model,
    variable_names,
    with_lengths,
)
from openwork.tensorflow.surgery import cuts_by_parameter
from openwork.tensorflow.verification import difference, masked_weight, mixed_axes, verify_graph

_LOG = logging.getLogger("openwork")

__all__ = ["KerasAnalysis", "analyze", "prune", "verify"]


@dataclass(eq=False)
class KerasAnalysis:
    """Dependencies of a Keras model's channels.

    Attributes:
        model: the model that was analysed; not touched.
        signature: what it was traced with.
        traced: its graph.
        graph: the analysis of the graph; weights and layers have their Keras paths.
    """

    model: keras.Model
    signature: Any
    traced: Traced
    graph: GraphAnalysis

    @property
    def groups(self) -> tuple[PruneGroup, ...]:
        """Units that may be removed."""
        return self.graph.groups

    @property
    def frozen(self) -> tuple[Frozen, ...]:
        """What may not, with reasons."""
        return self.graph.frozen

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one sample."""
        return self.graph.macs

    @property
    def params(self) -> int:
        """Elements of all weights that were read."""
        return self.graph.params

    @property
    def costs(self) -> list[CostTerm]:
        """What each operator, weight and result costs as a function of the units kept in each group."""
        return self.graph.costs

    def __str__(self) -> str:
        from rich.console import Console

        from openwork.report.analysis import analysis_table

        stream = io.StringIO()
        Console(file=stream, width=118).print(analysis_table(self, self.model.name))
        return stream.getvalue().rstrip()


def analyze(model: keras.Model, inputs: Any = None) -> KerasAnalysis:
    """Find what depends on what in a Keras model.

    Args:
        model: a built Keras 3 model on TensorFlow: functional, sequential or subclassed. It is not touched.
        inputs: an example of what it takes (an array, or a list or dict of arrays); not needed where the model has
            symbolic inputs.

    Returns:
        The analysis: ``groups`` that may be pruned, ``frozen`` with reasons, ``macs``, ``params``, ``costs``.

    Raises:
        UnsupportedModelError: no Keras model, or another backend.
        ConfigError: no inputs where they are needed.
        ModelError: the model's code fails (says why).
    """
    module = check_model(model)
    open_signature = signature_of(module, inputs)
    signature = with_lengths(open_signature)
    traced = trace_model(module, signature)
    if not traced.complete:
        raise ModelError(f"model {module.name!r} cannot be run: {traced.error}")
    names = variable_names(module)
    layers = {name: name.rpartition("/")[0] or name for name in names.values()}
    graph = analyze_graph(traced.graph_def, traced.outputs, layers=layers)
    if any(spec.shape.rank and spec.shape[0] is None for spec in keras.tree.flatten(open_signature)):
        graph.trace.bound.samples = BATCH
    analysis = KerasAnalysis(module, signature, traced, graph)
    _hold_key_dims(analysis)
    return analysis


def _hold_key_dims(analysis: KerasAnalysis) -> None:
    """Keras computes attention's scale from key_dim when the layer is made: it must not change."""
    names = {id(variable): name for name, variable in _variables(analysis.model).items()}
    everything = np.ones(analysis.graph.trace.store.count, dtype=bool)
    everything[RIGID] = False
    for layer in analysis.model._flatten_layers():
        if isinstance(layer, keras.layers.MultiHeadAttention):
            held = [layer._query_dense]
        elif isinstance(layer, keras.layers.GroupQueryAttention):
            held = [layer._query_dense, layer._value_dense]  # one length for all of them
        else:
            continue
        for dense in held:
            labels = analysis.graph.trace.parameters.get(names.get(id(dense._kernel), ""))
            if labels is not None:
                last = tuple(entry for entry in labels.entries if len(labels.shape) - 1 in entry.axes)
                why = f"attention's scale depends on the length of its keys ({layer.path})"
                analysis.graph.freeze([replace(labels, entries=last)], everything, why)


def _variables(model: keras.Model) -> dict[str, Any]:
    names = variable_names(model)
    return {names[id(variable)]: variable for variable in model.variables}


def prune(
    model: keras.Model,
    inputs: Any = None,
    ratio: float = 0.5,
    round_to: int = 1,
    importance: Any = "balanced_l2",
    skip: Collection[str] = (),
    groups: Mapping[int, IntArray] | None = None,
    analysis: KerasAnalysis | None = None,
) -> tuple[keras.Model, PrunePlan]:
    """Prune every group of channels that a weight produces.

    Args:
        model: see `analyze`; it is not touched.
        inputs: see `analyze`.
        ratio: share of each group's units to remove, in (0, 1).
        round_to: kept channels are rounded up to a multiple of this where the group is large enough.
        importance: name of a criterion (`openwork.importance.names`), or an object with ``score(group, weights)``.
        skip: paths of layers; a group with a producer in one of them (or below it) is left alone.
        groups: instead of a ratio: which units of which group (``analyze(...).groups``) go.
        analysis: what `analyze` gave for this model, so that it is not made again.

    Returns:
        A smaller trainable model, not compiled, and the plan that made it.

    Raises:
        ConfigError: a bad argument.
        NothingToPruneError: no group may be pruned (says what is frozen).
        UnsupportedModelError: no Keras model, or one that cannot be copied.
        ModelError: the model's code fails.
    """
    check_share(ratio, round_to)
    skip = paths_given(skip, groups)
    if analysis is None:
        analysis = analyze(model, inputs)
    elif not isinstance(analysis, KerasAnalysis):
        raise ConfigError(f"analysis is a {type(analysis).__name__}; what analyze(model, inputs) gives is needed")
    elif analysis.model is not check_model(model):
        raise ConfigError(f"analysis is of another model ({analysis.model.name!r}); give analyze(model, inputs)")
    layers = {name.rpartition("/")[0] for name in _variables(model)}
    for path in skip:
        if path not in layers and not any(layer.startswith(path + "/") for layer in layers):
            raise ConfigError(f"skip: {path!r} is no layer of {model.name!r}; {nearest(path, layers)}")
    variables = _variables(model)
    cache: dict[str, np.ndarray] = {}

    def weights(name: str) -> np.ndarray:
        if name not in cache:
            value = keras.ops.convert_to_numpy(variables[name])
            cache[name] = value if value.dtype in (np.float32, np.float64) else value.astype(np.float32)
        return cache[name]

    while True:
        if groups is not None:
            chosen = named_units(analysis.groups, groups)
        else:
            chosen = units_by_ratio(
                analysis.groups, ratio, round_to, importance, weights, lambda group: lies_in(group, skip, "/")
            )
            if not chosen:
                raise NothingToPruneError(nothing_goes(model.name, analysis.groups, analysis.frozen))
        asked = [group for group in analysis.groups if group.index in chosen]
        made = _smaller(analysis, Plan(analysis.graph.plan(chosen)))
        if not isinstance(made, str):
            warn_of_config(model, made[0])
            return made
        if groups is not None:
            raise ConfigError(f"groups: the model's code does not allow this choice: {made}")
        _tell_kept(asked, analysis.groups, made)


def _tell_kept(asked: Sequence[PruneGroup], left: Sequence[PruneGroup], why: str) -> None:
    """Say which layers lose nothing after all, where a group turned out to be tied by the model's code."""
    still = {member.module for group in left for member in group.producers}
    whole = [m.module for group in asked for m in group.producers if m.module not in still]
    _LOG.warning(
        "%s: %s", f"all channels of {', '.join(dict.fromkeys(whole))} stay" if whole else "fewer channels go", why
    )


def _smaller(analysis: KerasAnalysis, plan: Plan) -> tuple[keras.Model, PrunePlan] | str:
    """The smaller model and the plan with its repairs; or why more had to be frozen."""
    model, graph = analysis.model, analysis.graph
    dead = graph.dead(plan)
    cuts = cuts_by_parameter(plan, {name: source.shape for name, source in graph.sources.items()})
    twin = copy_model(model)
    repairs = shrink(twin, names_in_copy(model, twin), cuts) + state_reshapes(twin, graph, dead)
    tried: set[tuple[str, str, str]] = set()
    while True:
        traced = trace_model(twin, analysis.signature)
        found = first_difference(graph, analysis.traced, traced, dead)
        if found is None:
            break
        repair = next(
            (item for item in candidates(twin, found) if (item.module, item.attribute, repr(item.new)) not in tried),
            None,
        )
        if repair is None:
            return _hold(analysis, found.operator, found.text, dead)
        tried.add((repair.module, repair.attribute, repr(repair.new)))
        set_attribute(twin, repair)
        repairs.append(repair)
    if is_functional(twin):
        twin = rebuilt(twin, analysis.signature)
    return twin, PrunePlan(plan.groups, tuple(_merged(repairs)))


def _hold(analysis: KerasAnalysis, operator: str, text: str, dead: np.ndarray) -> str:
    """Freeze what runs through an operator that cannot follow, or through the ones before it; says why."""
    records = {record.module: record for record in analysis.graph.trace.records}
    order = analysis.traced.order
    scope = operator.rpartition("/")[0] or "the model itself"
    why = f"a size is written in the code ({scope}: {text})"
    for name in reversed(order[: order.index(operator) + 1]):
        record = records.get(name)
        if record is not None and analysis.graph.freeze([*record.inputs, *record.outputs], dead, why):
            return why
    raise ModelError(f"the smaller model would not run: {operator}: {text}")


def _merged(repairs: list[Repair]) -> list[Repair]:
    """One repair for each attribute, from the first old to the last new value."""
    merged: dict[tuple[str, str], Repair] = {}
    for item in repairs:
        first = merged.get((item.module, item.attribute))
        old = item.old if first is None else first.old
        merged[item.module, item.attribute] = Repair(item.module, item.attribute, old, item.new)
    return list(merged.values())


def verify(model: keras.Model, pruned: keras.Model, plan: Plan, inputs: Any) -> float:
    """Masked equivalence of a pruned Keras model.

    Args:
        model: the original.
        pruned: what the plan made of it (not retrained).
        plan: the plan.
        inputs: an array, or a list or dict of arrays.

    Returns:
        max |difference| / max |output| over all outputs; infinite if shapes differ or values are not finite.

    Raises:
        RecordError: the plan is of another model.
        ModelError: a model fails, or hides weights inside a loop, where they cannot be masked.
    """
    signature = signature_of(check_model(model), inputs)
    given_plan(plan)
    first, second = trace_model(model, signature), trace_model(check_model(pruned, "pruned"), signature)
    for traced, name in ((first, model.name), (second, pruned.name)):
        if not traced.complete:
            raise ModelError(f"model {name!r} cannot be run: {traced.error}")
    if len(first.outputs) != len(second.outputs):
        raise RecordError(f"the models have {len(first.outputs)} and {len(second.outputs)} outputs")
    feeds = feeds_of(first, inputs, signature)
    if any(node.op == "VarHandleOp" and _inside(first, node.name) for node in first.graph_def.node):
        return _verify_by_weights(model, pruned, plan, inputs)
    return verify_graph(frozen_graph(model, first), frozen_graph(pruned, second), plan, first.outputs, feeds)


def _inside(traced: Traced, name: str) -> bool:
    """Whether a variable is handed to a function (a loop over time steps)."""
    readers = (node for node in traced.graph_def.node if any(i.removesuffix(":0") == name for i in node.input))
    return any(node.op not in ("ReadVariableOp", "ResourceGather", "NoOp") for node in readers)


def _verify_by_weights(model: keras.Model, pruned: keras.Model, plan: Plan, inputs: Any) -> float:
    """As `verify`, on a copy of the model with masked weights: what runs inside a loop is out of a graph's reach.

    Raises:
        ModelError: statistics run across channels that go; masked weights alone do not show what they become.
    """
    graph = analyze(model, inputs).graph
    dead = graph.dead(plan)
    for record in graph.trace.records:
        mixed = set(mixed_axes(record))
        if any(mixed & set(e.axes) and dead[e.labels].any() for e in (record.inputs[0].entries if mixed else ())):
            raise ModelError(
                f"model {model.name!r} cannot be verified: {record.name} {record.module} takes statistics across "
                "channels that go, and a loop hides weights, so that the original cannot be masked"
            )
    masked = copy_model(model)
    names = names_in_copy(model, masked)
    variables = {names[id(variable)]: variable for variable in masked.weights}
    for name, parts in cuts_by_parameter(plan, {name: s.shape for name, s in graph.sources.items()}).items():
        value = keras.ops.convert_to_numpy(variables[name])
        variables[name].assign(masked_weight(value, parts, graph.consumed()))
    run = [keras.tree.flatten(m(inputs, training=False)) for m in (masked, pruned)]
    return max(
        difference(keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b)) for a, b in zip(*run, strict=True)
    )
