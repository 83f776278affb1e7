"""Seeing a constant weight behind the nodes that only carry it: Identity, Transpose, Reshape, Cast, Q/DQ.

While walking from the operator up to the stored tensor, the axis of the input channels is followed: it may move
(Transpose) and may become a factor of an axis (Reshape).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import AttributeProto, NodeProto, TensorProto

from openwork.onnx.modelfile import ModelFile, tensor_bits
from openwork.onnx.scopes import DEFAULT_DOMAINS, Scope, Value, label

__all__ = [
    *("FunctionInput", "Hidden", "NotConstant", "PackedView", "Source", "constant_array", "find_source"),
    *("list_attribute", "packed_view", "shapes_along", "whole_attribute"),
]

_STEPS = ("Identity", "Transpose", "Reshape", "Cast", "DequantizeLinear", "QuantizeLinear", "Squeeze", "Unsqueeze")
_SHAPE_STEPS = ("Transpose", "Reshape", "Squeeze", "Unsqueeze")
_MAXIMUM_STEPS = 64


class NotConstant(Exception):
    """The weight is not a stored constant; the text is the reason."""


@dataclass(frozen=True)
class Hidden:
    """A node between the stored tensor and the operator, nearest to the operator first.

    Attributes:
        node: the node.
        value: what it makes.
    """

    node: NodeProto
    value: Value


class FunctionInput(NotConstant):
    """The weight is an input of the local function around the operator.

    Attributes:
        value: that input.
        steps: nodes between it and the operator, nearest to the operator first.
    """

    def __init__(self, value: Value, steps: list[Hidden]) -> None:
        super().__init__(f"dynamic weight: {value.name!r} is an input of the function")
        self.value, self.steps = value, steps


@dataclass(eq=False)
class Source:
    """The stored tensor behind a weight.

    Attributes:
        value: its definition: an initializer, or the output of a Constant node.
        tensor: the data.
        steps: nodes between it and the operator, nearest to the operator first.
    """

    value: Value
    tensor: TensorProto
    steps: list[Hidden] = field(default_factory=list)

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.tensor.dims)


@dataclass(frozen=True)
class PackedView:
    """The stored tensor seen as `shape` (same elements, C order), packed along `axis`, which has whole channels."""

    shape: tuple[int, ...]
    axis: int


def whole_attribute(node: NodeProto, name: str, default: int) -> int:
    """Value of an integer attribute, `default` when it is absent.

    Raises:
        NotConstant: it has another type, or is a parameter of the function around the node.
    """
    found = _attribute(node, name, AttributeProto.INT)
    return default if found is None else int(found.i)


def list_attribute(node: NodeProto, name: str) -> list[int] | None:
    """Value of an attribute that is a list of integers, None when it is absent; raises as `whole_attribute`."""
    found = _attribute(node, name, AttributeProto.INTS)
    return None if found is None else [int(number) for number in found.ints]


def _attribute(node: NodeProto, name: str, kind: int) -> AttributeProto | None:
    for found in node.attribute:
        if found.name == name:
            if found.ref_attr_name:
                raise NotConstant(f"attribute {name} of {label(node)} is a parameter of the function around it")
            if found.type != kind:
                raise NotConstant(f"attribute {name} of {label(node)} has a wrong type")
            return found
    return None


def constant_tensor(value: Value, constant_inputs: bool) -> TensorProto | None:
    """The tensor that a value is, when it is an initializer or a Constant node's `value`."""
    if value.tensor is not None and (not value.is_input or constant_inputs):
        return value.tensor
    node = value.node
    if node is not None and node.op_type == "Constant" and node.domain in DEFAULT_DOMAINS:
        for found in node.attribute:
            if found.name == "value" and found.type == AttributeProto.TENSOR and not found.ref_attr_name:
                return found.t
    return None


def constant_array(file: ModelFile, scope: Scope, name: str, constant_inputs: bool) -> npt.NDArray[Any] | None:
    """A small constant (shape, axes, zero-point) as an array; None when it is computed."""
    for _ in range(_MAXIMUM_STEPS):
        value = scope.find(name)
        if value is None:
            return None
        tensor = constant_tensor(value, constant_inputs)
        if tensor is not None:
            return file.array(tensor) if tensor_bits(tensor.data_type) is not None else None
        node = value.node
        if node is None or node.domain not in DEFAULT_DOMAINS:
            return None
        if node.op_type == "Constant":
            for found in node.attribute:
                if found.ref_attr_name:
                    return None
                if found.name == "value_ints":
                    return np.array(found.ints, np.int64)
                if found.name == "value_int":
                    return np.array(found.i, np.int64)
            return None
        if node.op_type != "Identity" or len(node.input) != 1:
            return None
        scope, name = value.scope, node.input[0]
    return None


def find_source(scope: Scope, name: str, constant_inputs: bool) -> Source:
    """The stored tensor behind `name`.

    Args:
        scope: where the name is read.
        name: an operator's weight input.
        constant_inputs: initializers that are also graph inputs count as constant (IR version below 4).

    Raises:
        NotConstant: it is computed, or an input.
    """
    steps: list[Hidden] = []
    for _ in range(_MAXIMUM_STEPS):
        value = scope.find(name)
        if value is None:
            raise NotConstant("dynamic weight")
        tensor = constant_tensor(value, constant_inputs)
        if tensor is not None:
            return Source(value, tensor, steps)
        if value.tensor is not None:
            raise NotConstant(f"dynamic weight: {name!r} is also an input of the graph, so it may be overridden")
        if value.is_input and value.scope.is_function:
            raise FunctionInput(value, steps)
        if value.is_input:
            kind = "body" if value.scope.parent else "graph"
            raise NotConstant(f"dynamic weight: {name!r} is an input of the {kind}")
        node = value.node
        if node is None:
            raise NotConstant(f"sparse weight: {name!r} is a sparse initializer")
        if node.domain not in DEFAULT_DOMAINS or node.op_type not in _STEPS or not node.input:
            raise NotConstant(f"dynamic weight: computed by {label(node)}")
        if node.output[0] != value.name:
            raise NotConstant(f"dynamic weight: computed by {label(node)}")
        steps.append(Hidden(node, value))
        scope, name = value.scope, node.input[0]
    raise NotConstant(f"dynamic weight: behind more than {_MAXIMUM_STEPS} nodes")


def shapes_along(file: ModelFile, source: Source, constant_inputs: bool) -> list[tuple[int, ...]]:
    """Shape of the weight at the operator, then before each of `source.steps`, down to the stored shape.

    Raises:
        NotConstant: a Reshape, Squeeze or Unsqueeze whose target is computed or does not fit.
    """
    shapes = [source.dims]
    for step in reversed(source.steps):
        shapes.append(_shape_after(file, step, shapes[-1], constant_inputs))
    return shapes[::-1]


def _shape_after(file: ModelFile, step: Hidden, shape: tuple[int, ...], constant_inputs: bool) -> tuple[int, ...]:
    node = step.node
    if node.op_type == "Transpose":
        order = _order(node, len(shape))
        return tuple(shape[axis] for axis in order)
    if node.op_type == "Reshape":
        target = None
        if len(node.input) > 1:
            found = constant_array(file, step.value.scope, node.input[1], constant_inputs)
            target = None if found is None else [int(size) for size in found.reshape(-1)]
        if target is None:
            raise NotConstant(f"dynamic weight: the shape of {label(node)} is computed")
        if not whole_attribute(node, "allowzero", 0):
            target = [shape[axis] if size == 0 and axis < len(shape) else size for axis, size in enumerate(target)]
        known = int(np.prod([size for size in target if size != -1], dtype=object)) if target else 1
        total = int(np.prod(shape, dtype=object)) if shape else 1
        if target.count(-1) == 1 and known > 0 and total % known == 0:
            target[target.index(-1)] = total // known
        if any(size < 0 for size in target) or int(np.prod(target, dtype=object)) != total:
            raise NotConstant(f"{label(node)} cannot give {list(shape)} the shape {target}")
        return tuple(target)
    if node.op_type in ("Squeeze", "Unsqueeze"):
        axes = list_attribute(node, "axes")
        if axes is None and len(node.input) > 1 and node.input[1]:
            found = constant_array(file, step.value.scope, node.input[1], constant_inputs)
            if found is None:
                raise NotConstant(f"dynamic weight: the axes of {label(node)} are computed")
            axes = [int(axis) for axis in found.reshape(-1)]
        return _squeezed(node, shape, axes)
    return shape


def _squeezed(node: NodeProto, shape: tuple[int, ...], axes: list[int] | None) -> tuple[int, ...]:
    if node.op_type == "Squeeze":
        places = [a for a, n in enumerate(shape) if n == 1] if axes is None else [a % max(1, len(shape)) for a in axes]
        if any(shape[place] != 1 for place in places if place < len(shape)):
            raise NotConstant(f"{label(node)} cannot squeeze {list(shape)}")
        return tuple(size for axis, size in enumerate(shape) if axis not in places)
    rank = len(shape) + len(axes or ())
    places = [axis % rank for axis in axes or ()]
    rest = iter(shape)
    if len(set(places)) != len(places):
        raise NotConstant(f"{label(node)} names an axis twice")
    return tuple(1 if axis in places else next(rest) for axis in range(rank))


def _order(node: NodeProto, rank: int) -> list[int]:
    order = list_attribute(node, "perm")
    order = list(range(rank))[::-1] if order is None else order
    if sorted(order) != list(range(rank)):
        raise NotConstant(f"{label(node)} has the perm {order} for {rank} axes")
    return order


def packed_view(source: Source, shapes: list[tuple[int, ...]], axis: int, blocks: int) -> PackedView:
    """Where the input channels lie in the stored tensor.

    Args:
        source: what `find_source` gave.
        shapes: what `shapes_along` gave.
        axis: the axis of the input channels at the operator, not negative.
        blocks: equal blocks of that axis in each of which groups start anew.

    Raises:
        NotConstant: a Reshape cuts through the input channels.
    """
    before, length, after = blocks, shapes[0][axis] // blocks, 1
    for index, step in enumerate(source.steps):
        if step.node.op_type == "Transpose":
            axis = _order(step.node, len(shapes[index]))[axis]
        elif step.node.op_type in _SHAPE_STEPS:
            # Elements of one channel block lie `inner` apart in C order; find the axis that holds that range.
            inner = after * int(np.prod(shapes[index][axis + 1 :], dtype=np.int64))
            shape = shapes[index + 1]
            for candidate in range(len(shape)):
                below = int(np.prod(shape[candidate + 1 :], dtype=np.int64))
                if below and inner % below == 0 and shape[candidate] % (length * (inner // below)) == 0:
                    axis, after = candidate, inner // below
                    before = shape[candidate] // (length * after)
                    break
            else:
                raise NotConstant(f"{label(step.node)} cuts through the input channels")
    dims = source.dims
    inside = (before,) * (before > 1) + (length,) + (after,) * (after > 1)
    return PackedView((*dims[:axis], *inside, *dims[axis + 1 :]), axis + (before > 1))
