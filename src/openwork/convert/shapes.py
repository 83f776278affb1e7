"""ATC's ``--input_shape`` and ``--out_nodes``: fixing input shapes, cutting a model at given outputs."""

from __future__ import annotations

import contextlib

import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto

from openwork.errors import ConfigError, ConversionError, nearest
from openwork.onnx.scopes import bodies

__all__ = ["apply_input_shapes", "cut_at", "parse_input_shape", "real_inputs"]


def parse_input_shape(text: str) -> dict[str, list[int]]:
    """``"a:1,3,224,224;b:1,10"`` to {a: [1, 3, 224, 224], b: [1, 10]}; -1 leaves an axis dynamic.

    Raises:
        ConfigError: not of this form.
    """
    shapes: dict[str, list[int]] = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        name, colon, sizes = part.rpartition(":")
        try:
            numbers = [int(size) for size in sizes.split(",")] if sizes.strip() else []
        except ValueError:
            numbers = [-2]
        if not colon or not name.strip() or any(number < -1 or number == 0 for number in numbers):
            raise ConfigError(
                f"--input_shape {part!r}: not of the form name:1,3,224,224 (several separated by ';'; lengths of at "
                "least 1, -1 for dynamic)"
            )
        if name.strip() in shapes:
            raise ConfigError(f"--input_shape names {name.strip()!r} twice")
        shapes[name.strip()] = numbers
    if not shapes:
        raise ConfigError(f"--input_shape {text!r}: not of the form name:1,3,224,224")
    return shapes


def real_inputs(model: ModelProto) -> list[ValueInfoProto]:
    """Inputs of the graph that are not initializers."""
    initial = {tensor.name for tensor in model.graph.initializer}
    return [info for info in model.graph.input if info.name not in initial]


def apply_input_shapes(model: ModelProto, shapes: dict[str, list[int]]) -> None:
    """Fix the shapes of inputs in place.

    Raises:
        ConfigError: an unknown input, another number of axes, or a size that contradicts the model.
    """
    inputs = {info.name: info for info in real_inputs(model)}
    for name, sizes in shapes.items():
        if name not in inputs:
            raise ConfigError(f"--input_shape: the model has no input {name!r}; {nearest(name, inputs)}")
        kind = inputs[name].type.tensor_type
        if kind.HasField("shape"):
            known = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]
            wrong = len(known) != len(sizes) or any(
                old > 0 and new not in (old, -1) for old, new in zip(known, sizes, strict=False)
            )
            if wrong:
                raise ConfigError(f"--input_shape {name}:{sizes}: the model's input has the shape {known}")
        else:
            for _ in sizes:
                kind.shape.dim.add()
        for dim, size in zip(kind.shape.dim, sizes, strict=True):
            if size >= 0:
                dim.dim_value = size


def cut_at(model: ModelProto, text: str) -> None:
    """Make the outputs named in ``"node:0;node:1"`` or ``"tensor;tensor"`` the outputs; drop what they do not need.

    Raises:
        ConfigError: no such node or output.
    """
    graph = model.graph
    by_node = {node.name: node for node in graph.node if node.name}
    made = {name for node in graph.node for name in node.output if name}
    wanted: list[str] = []
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        node_name, colon, place = part.rpartition(":")
        if part in made:
            wanted.append(part)
        elif colon and place.isdigit() and node_name in by_node:
            made_here = by_node[node_name].output
            if int(place) >= len(made_here):
                raise ConfigError(f"--out_nodes {part!r}: node {node_name!r} has {len(made_here)} outputs")
            wanted.append(made_here[int(place)])
        else:
            name = node_name if colon and place.isdigit() else part
            raise ConfigError(f"--out_nodes {part!r}: no such node or tensor; {nearest(name, {*by_node, *made})}")
    if not wanted:
        raise ConfigError(f"--out_nodes {text!r}: not of the form node:0 (several separated by ';')")
    known = {info.name: info for info in [*graph.output, *graph.value_info]}
    if any(name not in known for name in wanted):
        # Marked weights have shapes but no data, which is all that inference needs of them.
        with contextlib.suppress(Exception):
            inferred = onnx.shape_inference.infer_shapes(_without_data(model))
            known.update({info.name: info for info in inferred.graph.value_info if info.name not in known})
    outputs = []
    for name in wanted:
        info = ValueInfoProto()
        if name not in known:
            raise ConversionError(f"--out_nodes: the type of {name!r} is not known, so it cannot become an output")
        info.CopyFrom(known[name])
        outputs.append(info)
    _keep_only(model, set(wanted))
    del graph.output[:]
    graph.output.extend(outputs)


def _without_data(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.external_data:
            del tensor.external_data[:]
            tensor.data_location = TensorProto.DEFAULT
    return copy


def _reads(node: NodeProto) -> set[str]:
    names = set(node.input)
    for _, body in bodies(node):
        names |= {info.name for info in body.output}
        for inner in body.node:
            names |= _reads(inner)
    return names


def _keep_only(model: ModelProto, wanted: set[str]) -> None:
    graph = model.graph
    needed = set(wanted)
    keep = []
    for node in reversed(list(graph.node)):
        if needed.intersection(node.output):
            needed |= _reads(node)
            keep.append(node)
    copies = []
    for node in reversed(keep):
        copy = NodeProto()
        copy.CopyFrom(node)
        copies.append(copy)
    tensors = []
    for tensor in graph.initializer:
        if tensor.name in needed:
            tensors.append(TensorProto())
            tensors[-1].CopyFrom(tensor)
    initial = {tensor.name for tensor in graph.initializer}
    inputs = []
    for info in graph.input:
        if info.name in needed or info.name not in initial:
            inputs.append(ValueInfoProto())
            inputs[-1].CopyFrom(info)
    del graph.node[:], graph.initializer[:], graph.input[:]
    graph.node.extend(copies)
    graph.initializer.extend(tensors)
    graph.input.extend(inputs)
