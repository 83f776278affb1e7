"""Which operators of a model have a constant 2:4 weight, and why the others do not qualify."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto

from openwork.errors import ConversionError
from openwork.onnx.functions import MODERN_OPSET, Layout, Library
from openwork.onnx.modelfile import ModelFile, tensor_bits, tensor_type_name
from openwork.onnx.scopes import DEFAULT_DOMAINS, Scope, Value, default_opset, label, read_scopes
from openwork.onnx.weights import (
    NotConstant,
    PackedView,
    Source,
    constant_array,
    find_source,
    packed_view,
    shapes_along,
    whole_attribute,
)
from openwork.sparsity.pack24 import Array, Pattern24, check24, packed_shapes

__all__ = ["NEWEST_OPSET", "OLDEST_OPSET", "Detection", "Layer", "detect"]

OLDEST_OPSET = 7
NEWEST_OPSET = 28

# Operator -> inputs that may hold the weight, the likelier first, with the input of that weight's zero-point.
_WEIGHT_SLOTS: dict[str, tuple[tuple[int, int | None], ...]] = {
    "Conv": ((1, None),),
    "ConvTranspose": ((1, None),),
    "Gemm": ((1, None), (0, None)),
    "MatMul": ((1, None), (0, None)),
    "ConvInteger": ((1, 3),),
    "MatMulInteger": ((1, 3), (0, 2)),
    "QLinearConv": ((3, 5),),
    "QLinearMatMul": ((3, 5), (0, 2)),
}
_STORABLE = (
    *(TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16),
    *(TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16),
    *(TensorProto.INT32, TensorProto.UINT32, TensorProto.INT64, TensorProto.UINT64),
    *(TensorProto.INT4, TensorProto.UINT4),
)
_SIGNED = (TensorProto.INT8, TensorProto.INT16, TensorProto.INT4)


@dataclass(eq=False)
class Layer:
    """One operator that could have a compressed twin.

    Attributes:
        node: the operator.
        scope: where it is.
        slot: its input that holds the weight; None when neither does.
        source: the stored tensor behind it.
        shape: the weight's shape as the operator sees it.
        axis: the axis of the input channels there.
        view: where the groups of four lie in the stored tensor.
        zero_point: value that stands for zero.
        pattern: what was counted; None when it was not looked at.
        reason: why the layer stays dense; None when it qualifies.
        dense_bytes: bytes of the stored tensor.
        packed_bytes: bytes of values and index, if it was looked at.
    """

    node: NodeProto
    scope: Scope
    slot: int | None = None
    source: Source | None = None
    shape: tuple[int, ...] = ()
    axis: int = 0
    view: PackedView | None = None
    zero_point: int = 0
    pattern: Pattern24 | None = None
    reason: str | None = None
    dense_bytes: int = 0
    packed_bytes: int = 0

    @property
    def name(self) -> str:
        return self.node.name or (self.node.output[0] if self.node.output else "")

    @property
    def layout(self) -> Layout:
        assert self.source is not None
        assert self.view is not None
        assert self.pattern is not None
        return Layout(
            data_type=self.source.tensor.data_type,
            dims=self.source.dims,
            view=self.view.shape,
            axis=self.view.axis,
            zero_point=self.zero_point,
            signs=self.pattern.hidden_negative_zeros,
        )


@dataclass
class Detection:
    """All layers of a model.

    Attributes:
        layers: in graph order.
        scopes: as `read_scopes` gives them.
        constant_inputs: initializers that are graph inputs, too, count as constants (IR version below 4).
    """

    layers: list[Layer]
    scopes: list[Scope]
    constant_inputs: bool
    weights: dict[int, list[Layer]] = field(default_factory=dict)


def detect(
    file: ModelFile,
    progress: Callable[[int, int], None] | None = None,
    keep_negative_zeros: bool = True,
) -> Detection:
    """Look at every operator of a model, bodies and local functions included.

    Args:
        file: the model.
        progress: called with (bytes of weights looked at, bytes in all).
        keep_negative_zeros: store the sign of zeros (see `Packed24.negative_zeros`).

    Raises:
        ConversionError: opset not supported, a broken graph, or tensor data that does not fit its shape.
    """
    model = file.model
    version = default_opset(model.opset_import)
    if not version and (model.graph.node or not model.opset_import):
        raise ConversionError(f"{file.path}: the model imports no version of the ONNX operators (opset)")
    if version and not OLDEST_OPSET <= version <= NEWEST_OPSET:
        raise ConversionError(
            f"{file.path}: opset {version} is not supported; allowed: {OLDEST_OPSET} to {NEWEST_OPSET}"
        )
    scopes = read_scopes(model)
    constant_inputs = model.ir_version < 4
    result = Detection([], scopes, constant_inputs)
    for scope in scopes:
        for node in scope.nodes:
            if node.op_type in _WEIGHT_SLOTS and node.domain in DEFAULT_DOMAINS:
                layer = Layer(node, scope)
                result.layers.append(layer)
                try:
                    _locate(file, layer, constant_inputs)
                except NotConstant as reason:
                    layer.reason = str(reason)
    _settle_sharing(result)
    _measure(file, result, progress, keep_negative_zeros)
    _settle_sharing(result)
    return result


def _locate(file: ModelFile, layer: Layer, constant_inputs: bool) -> None:
    """Fill in source, view and zero-point; raises NotConstant with the reason."""
    node = layer.node
    reasons: list[str] = []
    for slot, zero_slot in _WEIGHT_SLOTS[node.op_type]:
        if slot >= len(node.input) or not node.input[slot]:
            raise NotConstant("the operator has no weight input")
        try:
            source = find_source(layer.scope, node.input[slot], constant_inputs)
        except NotConstant as reason:
            reasons.append(str(reason))
            continue
        layer.slot, layer.source = slot, source
        layer.dense_bytes = file.nbytes(source.tensor)
        if tensor_bits(source.tensor.data_type) is not None:
            file.check(source.tensor)
        shapes = shapes_along(file, source, constant_inputs)
        layer.shape = shapes[0]
        blocks = _axis(layer)
        layer.view = packed_view(source, shapes, layer.axis, blocks)
        layer.zero_point = _zero_point(file, layer, zero_slot, constant_inputs)
        if layer.scope.root.is_function and layer.scope.opset < MODERN_OPSET:
            raise NotConstant(f"inside a local function of opset {layer.scope.opset}, below {MODERN_OPSET}")
        _refuse_types(layer)
        return
    if len(reasons) > 1 and reasons[0].startswith("dynamic weight: computed"):
        raise NotConstant("dynamic weight: no operand is a stored constant")
    raise NotConstant(reasons[0])


def _axis(layer: Layer) -> int:
    """Set the axis of the input channels; returns the number of blocks it consists of."""
    node, shape = layer.node, layer.shape
    kind = node.op_type
    if not shape:
        raise NotConstant("the weight is a scalar")
    if kind in ("Conv", "ConvInteger", "QLinearConv", "ConvTranspose"):
        groups = whole_attribute(node, "group", 1)
        if len(shape) < 3:
            raise NotConstant(f"a convolution's weight needs 3 axes or more; its shape is {list(shape)}")
        layer.axis = 0 if kind == "ConvTranspose" else 1
        if groups < 1 or shape[0] % groups:
            raise NotConstant(f"group {groups} does not divide the {shape[0]} channels of the weight")
        channels = shape[0] // groups if kind == "ConvTranspose" else shape[1]
        if groups > 1 and channels == 1:
            raise NotConstant("depthwise: one input channel per group")
        return groups if kind == "ConvTranspose" else 1
    if kind == "Gemm":
        if len(shape) != 2:
            raise NotConstant(f"a Gemm's weight needs 2 axes; its shape is {list(shape)}")
        flag = whole_attribute(node, "transB" if layer.slot == 1 else "transA", 0)
        layer.axis = int(bool(flag)) if layer.slot == 1 else 1 - int(bool(flag))
        return 1
    right = layer.slot in (1, 3)
    layer.axis = max(0, len(shape) - 2) if right and len(shape) > 1 else len(shape) - 1
    return 1


def _zero_point(file: ModelFile, layer: Layer, slot: int | None, constant_inputs: bool) -> int:
    """The stored value that means zero: from the operator's zero-point input or a DequantizeLinear on the way."""
    assert layer.source is not None
    kind = layer.source.tensor.data_type
    places = [(layer.scope, layer.node, slot)] if slot is not None else []
    steps = layer.source.steps
    # The first operator above the stored tensor that gives its numbers a meaning.
    for step in reversed(steps):
        if step.node.op_type == "DequantizeLinear":
            places = [(step.value.scope, step.node, 2)]
            break
        if step.node.op_type in ("QuantizeLinear", "Cast"):
            return 0
    for scope, node, place in places:
        if place is None or place >= len(node.input) or not node.input[place]:
            return 0
        array = constant_array(file, scope, node.input[place], constant_inputs)
        if array is None:
            raise NotConstant("zero-point: it is computed")
        numbers = np.unique(np.asarray(array).astype(np.int64))
        if numbers.size == 0:
            return 0
        if numbers.size > 1:
            raise NotConstant(
                f"zero-point: it differs between channels ({numbers[0]} to {numbers[-1]}); allowed: one value"
            )
        value = int(numbers[0])
        if value and kind in _SIGNED:
            raise NotConstant(f"zero-point: it is {value}; a signed weight needs 0")
        return value
    return 0


def _refuse_types(layer: Layer) -> None:
    assert layer.source is not None
    assert layer.view is not None
    kind = layer.source.tensor.data_type
    if kind not in _STORABLE:
        raise NotConstant(f"type: {tensor_type_name(kind)} weights are not packed")
    cin = layer.view.shape[layer.view.axis]
    if 0 in layer.view.shape:
        raise NotConstant("too small: the weight is empty")
    if cin <= 2:
        raise NotConstant(f"too small: {cin} input channel{'s' if cin > 1 else ''}")
    layer.packed_bytes = _packed_bytes(layer, signs=False)
    if layer.packed_bytes >= layer.dense_bytes:
        raise NotConstant(
            f"too small: {cin} input channels take {layer.packed_bytes:,} bytes compressed, {layer.dense_bytes:,} dense"
        )


def _packed_bytes(layer: Layer, signs: bool) -> int:
    assert layer.source is not None
    assert layer.view is not None
    values, index = packed_shapes(layer.view.shape, layer.view.axis)
    bits = tensor_bits(layer.source.tensor.data_type) or 8
    count = int(np.prod(values, dtype=object))
    extra = Library().legacy_bytes(
        Layout(layer.source.tensor.data_type, layer.source.dims, layer.view.shape, layer.view.axis),
        layer.scope.opset,
    )
    return (count * bits + 7) // 8 + int(np.prod(index, dtype=object)) * (2 if signs else 1) + extra


def _weight_key(layer: Layer) -> int:
    assert layer.source is not None
    return id(layer.source.value)


def _settle_sharing(result: Detection) -> None:
    """Give a reason to layers whose weight is also read in a way that needs it dense."""
    while True:
        weights: dict[int, list[Layer]] = defaultdict(list)
        for layer in result.layers:
            if layer.reason is None:
                weights[_weight_key(layer)].append(layer)
        changed = False
        for layers in weights.values():
            reason = _shared(layers)
            if reason is not None:
                changed = True
                for layer in layers:
                    layer.reason = reason
        if not changed:
            result.weights = dict(weights)
            return


def _shared(layers: list[Layer]) -> str | None:
    first = layers[0]
    for other in layers[1:]:
        if (other.view, other.zero_point) != (first.view, first.zero_point):
            return f"shared: {label(first.node)} and {label(other.node)} need it packed along different axes"
    # Everything that reads the stored tensor, or what a node on the way makes of it, must be one of the layers.
    allowed = {(id(layer.node), layer.slot) for layer in layers}
    values: dict[int, Value] = {}
    for layer in layers:
        assert layer.source is not None
        values[id(layer.source.value)] = layer.source.value
        for step in layer.source.steps:
            values[id(step.value)] = step.value
            allowed.add((id(step.node), 0))
    for value in values.values():
        for reading in value.readings:
            if reading.node is None:
                return f"shared: {value.name!r} is also an output of the graph"
            if (id(reading.node), reading.slot) not in allowed:
                return f"shared: {value.name!r} is also read by {label(reading.node)}"
    return None


def _measure(
    file: ModelFile,
    result: Detection,
    progress: Callable[[int, int], None] | None,
    keep_negative_zeros: bool,
) -> None:
    """Count non-zeros of every weight that is still a candidate."""
    total = sum(layers[0].dense_bytes for layers in result.weights.values())
    done = 0
    for layers in result.weights.values():
        first = layers[0]
        assert first.source is not None
        assert first.view is not None
        array: Array = file.array(first.source.tensor).reshape(first.view.shape)
        pattern = check24(array, first.view.axis, zero_point=first.zero_point)
        if not keep_negative_zeros:
            pattern = Pattern24(**{**pattern.__dict__, "hidden_negative_zeros": False})
        for layer in layers:
            layer.pattern = pattern
            layer.packed_bytes = _packed_bytes(layer, signs=pattern.hidden_negative_zeros)
            if not pattern.qualifies:
                layer.reason = (
                    f"not 2:4: {pattern.bad_groups:,} of {pattern.groups:,} groups have more than two non-zeros, the "
                    f"first at {list(_at_operator(layer, pattern))}"
                )
            elif layer.packed_bytes >= layer.dense_bytes:
                layer.reason = f"too small: {layer.packed_bytes:,} bytes compressed, {layer.dense_bytes:,} dense"
        done += first.dense_bytes
        if progress is not None:
            progress(done, total)


def _at_operator(layer: Layer, pattern: Pattern24) -> tuple[int, ...]:
    """The first offending position in the shape in which the tensor is stored."""
    assert layer.source is not None
    assert layer.view is not None
    place = np.ravel_multi_index(pattern.first_bad or (), layer.view.shape)
    return tuple(int(part) for part in np.unravel_index(int(place), layer.source.dims))
