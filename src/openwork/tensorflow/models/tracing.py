"""Keras models as graphs: traced once, with variables under their Keras paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from openwork.errors import ConfigError, ModelError, UnsupportedModelError, wrong_model
from openwork.tensorflow.functions import inlined
from openwork.tensorflow.graphs import first_line, made_up
from openwork.tensorflow.models.copying import is_functional

__all__ = [
    "Traced",
    "check_model",
    "feeds_of",
    "frozen_graph",
    "input_shapes",
    "names_in_copy",
    "signature_of",
    "trace_model",
    "variable_names",
    "with_lengths",
]


@dataclass(eq=False)
class Traced:
    """A model's forward pass in inference mode.

    Attributes:
        graph_def: the graph, functions inlined; each variable is a VarHandleOp named by its Keras path.
        inputs: names of its placeholders, in the order of the model's inputs.
        outputs: ``node:index``.
        order: names of its operators as they were made.
        graph: the graph itself.
        complete: False if the model's code raised before it came to an end.
        error: what it raised.
    """

    graph_def: tf.compat.v1.GraphDef
    inputs: list[str]
    outputs: list[str]
    order: list[str]
    graph: tf.Graph
    complete: bool = True
    error: str = ""


def check_model(model: Any, what: str = "model") -> keras.Model:
    """The model, if it is one.

    Args:
        model: what the caller gave.
        what: the argument that it was given for, for messages.

    Raises:
        UnsupportedModelError: it is no Keras 3 model on TensorFlow.
    """
    if not isinstance(model, keras.Model):
        raise wrong_model(what, model, "a Keras 3 model")
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedModelError(
            f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow before keras is imported"
        )
    return model


def variable_names(model: keras.Model) -> dict[int, str]:
    """The name of each variable in graphs and plans, by its ``id``: its path, made unique."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for variable in model.variables:
        name, count = variable.path, 1
        while name in taken:
            name, count = f"{variable.path}_{count}", count + 1
        taken.add(name)
        names[id(variable)] = name
    return names


def names_in_copy(model: keras.Model, twin: keras.Model) -> dict[int, str]:
    """The names of a copy's variables in graphs and plans of the original, by ``id``; paths may differ in a copy."""
    names = variable_names(model)
    return {id(copied): names[id(own)] for own, copied in zip(model.weights, twin.weights, strict=True)}


def signature_of(model: keras.Model, inputs: Any) -> Any:
    """What the model is traced with: specs of its symbolic inputs, or of example arrays with the batch left open.

    Raises:
        ConfigError: the model has no symbolic inputs and no example was given, or an example has no elements.
    """
    if inputs is None:
        if getattr(model, "inputs", None):
            return keras.tree.map_structure(
                lambda t: tf.TensorSpec(t.shape, t.dtype), model._inputs_struct if hasattr(model, "_inputs_struct")
                else model.inputs if len(model.inputs) > 1 else model.inputs[0],
            )  # fmt: skip
        raise ConfigError(f"{type(model).__name__} has no symbolic inputs; give inputs, an example of what it takes")

    def spec(value: Any) -> tf.TensorSpec:
        array = value if isinstance(value, tf.Tensor) else np.asarray(value)
        if array.dtype == np.float64:
            array = tf.convert_to_tensor(array, keras.config.floatx())
        if 0 in array.shape:
            raise ConfigError(f"an input of shape {list(array.shape)} has no elements; at least one is needed")
        shape = list(array.shape)
        return tf.TensorSpec([None, *shape[1:]] if shape else [], array.dtype)

    return keras.tree.map_structure(spec, inputs)


def with_lengths(signature: Any) -> Any:
    """The signature with made-up lengths where it is open, so that the length of every tensor is known."""
    return keras.tree.map_structure(lambda spec: tf.TensorSpec(made_up(spec.shape.as_list()), spec.dtype), signature)


def trace_model(model: keras.Model, signature: Any) -> Traced:
    """Run the model's code once on symbols, in inference mode.

    Args:
        model: a built model; its weights are not touched.
        signature: see `signature_of`.
    """
    graph = tf.__internal__.FuncGraph("openwork")
    names: list[str] = []
    outputs: Any = None
    error: Exception | None = None
    with graph.as_default():

        def placeholder(spec: tf.TensorSpec) -> Any:
            names.append(f"input_{len(names)}")
            return tf.compat.v1.placeholder(spec.dtype, spec.shape, name=names[-1])

        given = keras.tree.map_structure(placeholder, signature)
        try:
            outputs = model(given, training=False)
            outputs = [tf.identity(o, name=f"output_{i}") for i, o in enumerate(keras.tree.flatten(outputs))]
        except Exception as raised:
            error = raised
    variables = {id(variable.value.handle): variable for variable in model.variables}
    known = variable_names(model)
    handles = {inner.op.name: variables[id(outer)] for outer, inner in graph.captures if id(outer) in variables}
    graph_def = tf.compat.v1.GraphDef()
    graph_def.CopyFrom(graph.as_graph_def())
    renamed: dict[str, str] = {}
    for node in graph_def.node:
        variable = handles.get(node.name)
        if variable is not None:
            renamed[node.name] = known[id(variable)]
            node.Clear()
            node.name, node.op = known[id(variable)], "VarHandleOp"
            node.attr["dtype"].type = tf.as_dtype(variable.dtype).as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(variable.shape).as_proto())
            node.attr["shared_name"].s = node.name.encode()
    _rename_inputs(graph_def, renamed)
    order = [renamed.get(op.name, op.name) for op in graph.get_operations()]
    return Traced(
        inlined(_merged(graph_def)),
        names,
        [tensor.name for tensor in outputs] if error is None else [],
        order,
        graph,
        error is None,
        "" if error is None else first_line(error),
    )


def input_shapes(model: keras.Model, signature: Any) -> list[tuple[Any, list[tuple[int, ...]]]]:
    """The models inside a model that Keras rebuilds from configurations, and the shapes that each of them is given."""
    nested = [layer for layer in model._flatten_layers(include_self=False) if is_functional(layer)]
    found: dict[int, list[tuple[int, ...]]] = {}
    if not nested:
        return []

    def noting(layer: Any) -> Any:
        call = layer.call

        def noted(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            found[id(layer)] = [tuple(tensor.shape) for tensor in keras.tree.flatten(inputs)]
            return call(inputs, *args, **kwargs)

        return noted

    for layer in nested:
        layer.__dict__["call"] = noting(layer)
    try:
        trace_model(model, signature)
    finally:
        for layer in nested:
            del layer.__dict__["call"]
    return [(layer, found[id(layer)]) for layer in nested if id(layer) in found]


def _rename_inputs(graph_def: tf.compat.v1.GraphDef, renamed: Mapping[str, str]) -> None:
    for node in graph_def.node:
        for place, tensor in enumerate(node.input):
            mark = "^" if tensor.startswith("^") else ""
            name, colon, index = tensor.removeprefix("^").partition(":")
            if name in renamed:
                node.input[place] = f"{mark}{renamed[name]}{colon}{index}"


def _merged(graph_def: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """A variable that was captured twice is one node."""
    result = tf.compat.v1.GraphDef(versions=graph_def.versions)
    result.library.CopyFrom(graph_def.library)
    seen: set[str] = set()
    for node in graph_def.node:
        if node.name not in seen:
            seen.add(node.name)
            result.node.add().CopyFrom(node)
    return result


def frozen_graph(model: keras.Model, traced: Traced) -> tf.compat.v1.GraphDef:
    """The traced graph with the variables' values as constants of the same names.

    Raises:
        ModelError: a variable is used inside a function (a loop over time steps, say), where it cannot be replaced.
    """
    names = variable_names(model)
    values = {names[id(variable)]: variable for variable in model.variables}
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(traced.graph_def)
    handles = {node.name for node in result.node if node.op == "VarHandleOp"}
    for node in result.node:
        reads = [place for place, name in enumerate(node.input) if name.removesuffix(":0") in handles]
        if node.op == "VarHandleOp":
            value = keras.ops.convert_to_numpy(values[node.name])
            dtype = tf.as_dtype(values[node.name].dtype)
            name = node.name
            node.Clear()
            node.name, node.op = name, "Const"
            node.attr["dtype"].type = dtype.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
        elif node.op == "ReadVariableOp" and reads:
            kind = node.attr["dtype"].type
            for name in list(node.attr):
                del node.attr[name]
            node.op = "Identity"
            node.attr["T"].type = kind
        elif node.op == "ResourceGather" and reads:
            _as_gather(result, node)
        elif reads:
            raise ModelError(
                f"{node.op} {node.name!r} hides the variable {node.input[reads[0]]!r} inside a function; it cannot be "
                "frozen"
            )
    return result


def _as_gather(graph_def: tf.compat.v1.GraphDef, node: Any) -> None:
    dtype, indices = node.attr["dtype"].type, node.attr["Tindices"].type
    for name in list(node.attr):
        del node.attr[name]
    axis = graph_def.node.add(name=f"{node.name}/axis", op="Const")
    axis.attr["dtype"].type = tf.int32.as_datatype_enum
    axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0, tf.int32))
    data = [name for name in node.input if not name.startswith("^")]
    control = [name for name in node.input if name.startswith("^")]
    del node.input[:]
    node.input.extend([*data, axis.name, *control])
    node.op = "GatherV2"
    node.attr["Tparams"].type, node.attr["Tindices"].type = dtype, indices
    node.attr["Taxis"].type = tf.int32.as_datatype_enum


def feeds_of(traced: Traced, inputs: Any, signature: Any) -> dict[str, np.ndarray]:
    """Arrays by placeholder.

    Raises:
        ConfigError: other inputs than the model takes.
    """
    specs: Sequence[Any] = keras.tree.flatten(signature)
    values = keras.tree.flatten(inputs)
    if len(specs) != len(values):
        raise ConfigError(f"inputs holds {len(values)} arrays; the model takes {len(specs)}")
    return {
        f"{name}:0": np.asarray(value).astype(spec.dtype.as_numpy_dtype)
        for name, value, spec in zip(traced.inputs, values, specs, strict=True)
    }
