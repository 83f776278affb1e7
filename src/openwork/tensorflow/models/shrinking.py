"""Make a copy of a Keras model smaller: other variables, and the sizes that layers state.

What Keras' own layers state about their weights is certain. Where a layer states a size beside its weights (a
reshape), the smaller model is run on symbols and compared, operator by operator, with what the analysis predicts; at
the first difference the attributes of the layer at work are tried. Where none does it, the size is in the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from openwork.graph.plan import Cut, Repair
from openwork.graph.sizes import surviving_shape
from openwork.tensorflow.analysis import GraphAnalysis
from openwork.tensorflow.models.copying import is_functional, set_value
from openwork.tensorflow.models.tracing import Traced
from openwork.tensorflow.surgery import cut_array

__all__ = [
    "Difference",
    "candidates",
    "first_difference",
    "layers_of",
    "listed",
    "set_attribute",
    "shrink",
    "state_reshapes",
]


# The layers of Keras itself that state nothing but what is set below.
_KERAS_LAYERS = "keras.src.layers."


def layers_of(model: keras.Model) -> dict[str, Any]:
    """All layers inside a model by path, each once."""
    found: dict[str, Any] = {}
    for layer in model._flatten_layers(include_self=True):
        name, count = layer.path or layer.name, 1
        while name in found:
            name, count = f"{layer.path or layer.name}_{count}", count + 1
        found[name] = layer
    return found


def shrink(model: keras.Model, names: Mapping[int, str], cuts: Mapping[str, list[Cut]]) -> list[Repair]:
    """Cut the variables of a model in place, and set what its layers state about them.

    Args:
        model: a copy that nobody else uses.
        names: of its variables, by ``id``.
        cuts: what goes, by variable.

    Returns:
        the attributes that were set.
    """
    before = {id(variable): tuple(variable.shape) for variable in model.variables}
    for variable in model.variables:
        parts = cuts.get(names.get(id(variable), ""))
        if parts:
            set_value(variable, cut_array(keras.ops.convert_to_numpy(variable), parts))
    repairs: list[Repair] = []
    for path, layer in layers_of(model).items():
        if layer is not model and is_functional(layer):
            layer.input_spec = None  # a model inside the model checks its inputs against its symbolic ones
            continue
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        if any(tuple(variable.shape) != before[id(variable)] for variable in own if id(variable) in before):
            repairs += _stated(path, layer, before)
        elif isinstance(layer, keras.layers.MultiHeadAttention):
            repairs += _stated_attention(path, layer)
    return repairs


def _stated_attention(path: str, layer: Any) -> list[Repair]:
    """An attention layer states the sizes of the dense layers inside it."""
    output, value, query = (part._kernel for part in (layer._output_dense, layer._value_dense, layer._query_dense))
    repairs = []
    new = [int(size) for size in output.shape[2:]]
    if new != list(layer._output_shape or [int(query.shape[0])]):  # unless stated, that of the query
        repairs.append(Repair(path, "_output_shape", listed(layer._output_shape), new))
        layer._output_shape = tuple(new)
    for attribute, axis in (("_num_heads", -2), ("_value_dim", -1)):
        old, size = getattr(layer, attribute), int(value.shape[axis])
        if old != size:
            repairs.append(Repair(path, attribute, old, size))
            setattr(layer, attribute, size)
    return repairs


def _stated(path: str, layer: Any, before: Mapping[int, tuple[int, ...]]) -> list[Repair]:
    """What the classes of Keras state about the shapes of their variables."""
    repairs: list[Repair] = []

    def state(attribute: str, new: Any) -> None:
        old = getattr(layer, attribute)
        if old != new:
            repairs.append(Repair(path, attribute, listed(old), listed(new)))
            setattr(layer, attribute, new)

    kernel: Any = getattr(layer, "_kernel", getattr(layer, "kernel", None))
    base = {kind.__name__ for kind in type(layer).__mro__}
    if "BaseConvTranspose" in base:
        state("filters", int(kernel.shape[-2]))
    elif "BaseConv" in base:
        groups = layer.groups
        old = before[id(kernel)]
        if groups > 1 and old[-2] == 1:  # depthwise: the number of groups is the number of channels
            state("groups", int(kernel.shape[-1]) // (old[-1] // groups))
        state("filters", int(kernel.shape[-1]))
    elif "BaseSeparableConv" in base:
        state("filters", int(layer.pointwise_kernel.shape[-1]))
    elif isinstance(layer, keras.layers.Dense):
        state("units", int(kernel.shape[-1]))
    elif isinstance(layer, keras.layers.EinsumDense):
        _state_einsum(layer, before, state)
    elif isinstance(layer, keras.layers.Embedding):
        state("output_dim", int(layer._embeddings.shape[-1]))
    elif isinstance(layer, keras.layers.GroupNormalization):
        gamma = layer.gamma if layer.scale else layer.beta
        if layer.groups == before[id(gamma)][0]:
            state("groups", int(gamma.shape[0]))
    elif not type(layer).__module__.startswith(_KERAS_LAYERS):
        for attribute, new in _of_own_variables(layer, before):
            state(attribute, new)
    _check_no_lengths(layer)
    return repairs


def _of_own_variables(layer: Any, before: Mapping[int, tuple[int, ...]]) -> list[tuple[str, int]]:
    """Public attributes of a user's layer that hold a length of its own variables, with the new length."""
    own = [*layer._trainable_variables, *layer._non_trainable_variables]
    pairs = {
        old: new
        for variable in own
        for old, new in zip(before[id(variable)], (int(size) for size in variable.shape), strict=True)
        if old != new
    }
    found = []
    for name, value in vars(layer).items():
        if not name.startswith("_") and isinstance(value, int) and not isinstance(value, bool) and value in pairs:
            found.append((name, pairs[value]))
    return found


def _check_no_lengths(layer: Any) -> None:
    # Keras checks inputs against the lengths that it was built with.
    for spec in keras.tree.flatten(layer.input_spec) if layer.input_spec is not None else []:
        spec.axes, spec.shape = {}, None
    if hasattr(layer, "_build_shapes_dict"):
        layer._build_shapes_dict = None


def _state_einsum(layer: Any, before: Mapping[int, tuple[int, ...]], state: Any) -> None:
    """The free axes of the kernel are stated in the output's shape."""
    kernel = layer._kernel
    terms, _, result = layer.equation.replace(" ", "").partition("->")
    names = terms.split(",")[1]
    stated = list(layer.partial_output_shape)
    letters = result.replace("...", "")[-len(stated) :]
    for axis, name in enumerate(names):
        if name in letters and before[id(kernel)][axis] == stated[letters.index(name)]:
            stated[letters.index(name)] = int(kernel.shape[axis])
    if tuple(stated) != tuple(layer.partial_output_shape):
        state("partial_output_shape", tuple(stated))


def listed(value: Any) -> Any:
    """Tuples as lists, as a plan file holds them."""
    return [listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def set_attribute(model: keras.Model, repair: Repair) -> None:
    """Set one attribute of one layer; a list becomes the type that stands there."""
    layer = layers_of(model)[repair.module]
    found = getattr(layer, repair.attribute)
    setattr(layer, repair.attribute, tuple(repair.new) if isinstance(found, tuple) else repair.new)


def state_reshapes(model: keras.Model, analysis: GraphAnalysis, dead: np.ndarray) -> list[Repair]:
    """Set the targets of Keras' reshape layers, which the prediction gives; lengths that they leave open stay open.

    Args:
        model: the copy.
        analysis: of the original.
        dead: bool [labels], what dies.
    """
    reshapes = {layer.name: path for path, layer in layers_of(model).items() if isinstance(layer, keras.layers.Reshape)}
    repairs = []
    for record in analysis.trace.records if reshapes else ():
        scope = record.module.split("/")[-2:][0]
        stem, _, number = scope.rpartition("_")
        path = reshapes.get(scope) or (reshapes.get(stem) if number.isdigit() else None)
        if path is None or record.name != "Reshape":
            continue
        layer = layers_of(model)[path]
        shape = record.new_shape(0, dead)[1:]
        target = tuple(-1 if old == -1 else new for old, new in zip(layer.target_shape, shape, strict=False))
        if len(shape) == len(layer.target_shape) and target != tuple(layer.target_shape):
            repairs.append(Repair(path, "target_shape", listed(layer.target_shape), listed(target)))
            layer.target_shape = target
    return repairs


@dataclass(frozen=True, eq=False)
class Difference:
    """The first operator at which a smaller model is not what was predicted.

    Attributes:
        operator: its name in the original's graph.
        changes: lengths before and predicted after, of its inputs and outputs.
        text: what is wrong.
    """

    operator: str
    changes: list[tuple[int, int]]
    text: str


def first_difference(analysis: GraphAnalysis, original: Traced, smaller: Traced, dead: np.ndarray) -> Difference | None:
    """Compare the smaller model's operators with the prediction; None if all is as predicted.

    Args:
        analysis: of the original.
        original, smaller: both, traced in the same way.
        dead: bool [labels], what dies.
    """
    made = {op.name: op for op in smaller.graph.get_operations()}
    records = {record.module: record for record in analysis.trace.records}
    for name in original.order:
        record = records.get(name)
        if record is None:
            continue
        if name not in made:
            return Difference(name, _changes(record, dead), smaller.error or "the code takes another way")
        for index, labels in enumerate(record.outputs):
            shape = made[name].outputs[index].shape if index < len(made[name].outputs) else tf.TensorShape(None)
            expected = surviving_shape(labels, dead)
            if shape.is_fully_defined() and tuple(shape.as_list()) != expected:
                text = f"its result has shape {shape.as_list()}, {list(expected)} was predicted"
                return Difference(name, _changes(record, dead), text)
    return None if smaller.complete else Difference(original.order[-1], [], smaller.error)


def _changes(record: Any, dead: np.ndarray) -> list[tuple[int, int]]:
    if record is None:
        return []
    pairs: dict[tuple[int, int], None] = {}
    for labels in (*record.outputs, *record.inputs):
        for old, new in zip(labels.shape, surviving_shape(labels, dead), strict=True):
            if old != new:
                pairs[old, new] = None
    return list(pairs)


def candidates(model: keras.Model, difference: Difference) -> list[Repair]:
    """Attributes of the layer at work that hold a length that changes, with the new one in its place."""
    scopes = difference.operator.split("/")
    by_name: dict[str, tuple[str, Any]] = {layer.name: (path, layer) for path, layer in layers_of(model).items()}
    found: list[Repair] = []
    for scope in reversed(scopes[:-1]):
        stem, _, number = scope.rpartition("_")
        hit = by_name.get(scope) or (by_name.get(stem) if number.isdigit() else None)
        if hit is None:
            continue
        path, layer = hit
        for name, value in list(vars(layer).items()):
            if name.startswith("_self_") or isinstance(value, bool):
                continue
            for old, new in difference.changes:
                changed = _exchanged(value, old, new)
                if changed is not None:
                    found.append(Repair(path, name, listed(value), listed(changed)))
        if found:
            break
    return found


def _exchanged(value: Any, old: int, new: int) -> Any:
    if isinstance(value, int):
        return new if value == old else None
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, int) or item is None for item in value):
        return None
    return type(value)([new if item == old else item for item in value]) if old in value else None
