"""Plans of Keras models: data that makes a smaller copy of a model without choosing again."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import keras

from openwork.errors import RecordError, nearest
from openwork.graph.plan import Plan
from openwork.tensorflow.graphs import first_line
from openwork.tensorflow.models.copying import copy_model, is_functional
from openwork.tensorflow.models.shrinking import layers_of, listed, set_attribute, shrink
from openwork.tensorflow.models.tracing import check_model, input_shapes, names_in_copy, signature_of, variable_names
from openwork.tensorflow.surgery import cuts_by_parameter

_LOG = logging.getLogger("openwork")

__all__ = ["PrunePlan", "rebuilt", "warn_of_config"]


class PrunePlan(Plan):
    """A plan for a Keras model. It is data: it applies to the model built anew, without analysis.

    Weights and layers are found by their Keras paths, so layers need the names that they had. The name of the model
    itself may be another.
    """

    def apply(self, model: keras.Model) -> keras.Model:
        """A smaller trainable copy of `model`, not compiled; the model is not touched.

        Args:
            model: a built model of the same structure as the one that was pruned.

        Raises:
            RecordError: the plan is of another model, or the model is already pruned.
            UnsupportedModelError: no Keras model, or one that cannot be copied.
        """
        check_model(model)
        twin = copy_model(model)
        plan = _under_name(self, model)
        shapes = {variable_names(model)[id(v)]: tuple(int(n) for n in v.shape) for v in model.variables}
        cuts = cuts_by_parameter(plan, shapes)
        _check_repairs(plan, twin)
        shrink(twin, names_in_copy(model, twin), cuts)
        for repair in plan.repairs:
            set_attribute(twin, repair)
        return rebuilt(twin, signature_of(twin, None)) if is_functional(twin) else twin


def _under_name(plan: Plan, model: keras.Model) -> Plan:
    """The plan with this model's name in its paths: Keras numbers models of one class (``net``, ``net_1``)."""
    roots = {cut.parameter.partition("/")[0] for cut in plan.cuts}
    own = {variable.path.partition("/")[0] for variable in model.variables}
    if len(roots) != 1 or len(own) != 1 or roots == own:
        return plan
    (old,), (new,) = roots, own
    if new != model.name:
        return plan  # a layer's name, not the model's: another layer is another place

    def renamed(path: str) -> str:
        root, slash, rest = path.partition("/")
        return f"{new}{slash}{rest}" if root == old else path

    groups = tuple(
        replace(
            group,
            cuts=tuple(replace(c, parameter=renamed(c.parameter), layer=renamed(c.layer)) for c in group.cuts),
        )
        for group in plan.groups
    )
    return Plan(groups, tuple(replace(repair, module=renamed(repair.module)) for repair in plan.repairs))


def _check_repairs(plan: Plan, twin: keras.Model) -> None:
    """Raise RecordError unless every attribute holds what the plan found there."""
    layers = layers_of(twin)
    for repair in plan.repairs:
        where = f"{repair.module}.{repair.attribute}"
        if repair.module not in layers:
            raise RecordError(
                f"layer {repair.module!r} of the plan is not in the model; {nearest(repair.module, layers)}"
            )
        missing = object()
        found: Any = getattr(layers[repair.module], repair.attribute, missing)
        if found is missing or listed(found) != listed(repair.old):
            stands = "is not there" if found is missing else f"is {found!r}"
            raise RecordError(f"{where} {stands}; the plan needs {repair.old!r} (it is of another model)")


def rebuilt(twin: keras.Model, signature: Any) -> keras.Model:
    """The same model made from its configurations, so that symbolic shapes are right too."""
    for layer, shapes in input_shapes(twin, signature):
        entries = [inner for inner in layer._layers if isinstance(inner, keras.layers.InputLayer)]
        for entry, shape in zip(entries, shapes, strict=False):
            stated = zip(entry._batch_shape, shape, strict=True)
            entry._batch_shape = tuple(old if old is None else new for old, new in stated)
    try:
        result = keras.models.clone_model(twin)
        result.set_weights(twin.get_weights())
    except Exception as error:
        _LOG.warning(
            "the smaller %s runs, but Keras cannot make it from configurations; .keras files of it will not load: %s",
            twin.name,
            first_line(error),
        )
        return twin
    return result


def warn_of_config(model: keras.Model, smaller: keras.Model) -> None:
    """Say if Keras would make the smaller model as large as the original: its configuration is the same.

    A functional model is made from the configurations of its layers; any other by its own code.
    """
    if is_functional(smaller) or _described(smaller) != _described(model):
        return
    _LOG.warning(
        "the configuration of the smaller %s does not hold its new sizes, so a .keras file of it will not load: save "
        "the plan and the weights, and load the weights into PrunePlan.load(...).apply(...) of the model built anew",
        model.name,
    )


def _described(model: keras.Model) -> str:
    """The model's configuration as text; empty if it has none."""
    try:
        return json.dumps(keras.saving.serialize_keras_object(model)["config"], sort_keys=True)
    except Exception:  # whatever the model's own get_config raises
        return ""
