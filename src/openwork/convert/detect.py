"""Which operators of a model have a constant 2:4 weight, and why the others do not qualify."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from onnx import FunctionProto, NodeProto, TensorProto

from openwork.convert.layer import Handed, Layer
from openwork.convert.sharing import settle, store_signs_alike
from openwork.errors import ConversionError
from openwork.onnx.functions import MODERN_OPSET, Layout, Library
from openwork.onnx.modelfile import ModelFile, tensor_bits, tensor_type_name
from openwork.onnx.scopes import DEFAULT_DOMAINS, Scope, default_opset, label, read_scopes
from openwork.onnx.weights import (
    FunctionInput,
    NotConstant,
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
_MOST_CALLS = 1000
_SIGNED = (TensorProto.INT8, TensorProto.INT16, TensorProto.INT4)


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
    calls = _calls(scopes)
    constant_inputs = model.ir_version < 4
    result = Detection([], scopes, constant_inputs)
    for scope in scopes:
        for node in scope.nodes:
            if node.op_type in _WEIGHT_SLOTS and node.domain in DEFAULT_DOMAINS:
                result.layers.extend(_layers_of(file, node, scope, calls, constant_inputs))
    result.weights = settle(result.layers)
    _measure(file, result, progress, keep_negative_zeros)
    result.weights = settle(result.layers)
    return result


def _calls(scopes: list[Scope]) -> dict[int, list[tuple[NodeProto, Scope]]]:
    """Where each local function is called: scope of the function -> (node, its scope)."""
    functions: dict[tuple[str, str, str], Scope] = {}
    for scope in scopes:
        if isinstance(scope.holder, FunctionProto):
            functions[(scope.holder.domain, scope.holder.name, scope.holder.overload)] = scope
    found: dict[int, list[tuple[NodeProto, Scope]]] = defaultdict(list)
    for scope in scopes if functions else []:
        for node in scope.nodes:
            called = functions.get((node.domain, node.op_type, node.overload))
            if called is not None:
                found[id(called)].append((node, scope))
    return found


def _layers_of(
    file: ModelFile,
    node: NodeProto,
    scope: Scope,
    calls: dict[int, list[tuple[NodeProto, Scope]]],
    constant_inputs: bool,
) -> list[Layer]:
    """One layer; or, for an operator that reads a weight handed to a local function, one for each call of it."""
    layer = Layer(node, scope)
    try:
        _locate(file, layer, constant_inputs, None)
    except FunctionInput as reason:
        layers = []
        for call in calls.get(id(scope.root), ())[:_MOST_CALLS]:
            layers.append(Layer(node, scope))
            try:
                _locate(file, layers[-1], constant_inputs, call)
            except NotConstant as other:
                layers[-1].reason = str(other)
        if 0 < len(layers) < _MOST_CALLS and any(found.reason is None for found in layers):
            return layers
        layer.reason = str(reason)
    except NotConstant as reason:
        layer.reason = str(reason)
    return [layer]


def _find(
    layer: Layer, name: str, constant_inputs: bool, call: tuple[NodeProto, Scope] | None
) -> tuple[Source, Handed | None]:
    """`find_source`, going on at the place of the call when the weight is an input of the function around it."""
    try:
        return find_source(layer.scope, name, constant_inputs), None
    except FunctionInput as formal:
        if call is None:
            raise
        node, scope = call
        slot = list(formal.value.scope.holder.input).index(formal.value.name)  # type: ignore[arg-type]
        if slot >= len(node.input) or not node.input[slot]:
            raise NotConstant(f"dynamic weight: {label(node)} gives no {formal.value.name!r}") from None
        outer = find_source(scope, node.input[slot], constant_inputs)
        if outer.steps:
            raise NotConstant(f"the weight is computed before {label(node)} gets it") from None
        return Source(outer.value, outer.tensor, formal.steps), Handed(formal.value, node, slot, scope)


def _locate(file: ModelFile, layer: Layer, constant_inputs: bool, call: tuple[NodeProto, Scope] | None) -> None:
    """Fill in source, view and zero-point; raises NotConstant with the reason."""
    node = layer.node
    reasons: list[str] = []
    formal: FunctionInput | None = None
    for slot, zero_slot in _WEIGHT_SLOTS[node.op_type]:
        if slot >= len(node.input) or not node.input[slot]:
            raise NotConstant("the operator has no weight input")
        try:
            source, layer.handed = _find(layer, node.input[slot], constant_inputs, call)
        except NotConstant as reason:
            if isinstance(reason, FunctionInput):
                formal = formal or reason
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
    if formal is not None:
        raise formal
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
            if not pattern.qualifies:
                layer.reason = (
                    f"not 2:4: {pattern.bad_groups:,} of {pattern.groups:,} groups have more than two non-zeros, the "
                    f"first at {list(_at_operator(layer, pattern))}"
                )
        done += first.dense_bytes
        if progress is not None:
            progress(done, total)
    store_signs_alike([layer for layer in result.layers if layer.reason is None])
    for layer in result.layers:
        if layer.reason is None and layer.pattern is not None:
            layer.packed_bytes = _packed_bytes(layer, signs=layer.pattern.hidden_negative_zeros)
            if layer.packed_bytes >= layer.dense_bytes:
                layer.reason = f"too small: {layer.packed_bytes:,} bytes compressed, {layer.dense_bytes:,} dense"


def _at_operator(layer: Layer, pattern: Pattern24) -> tuple[int, ...]:
    """The first offending position in the shape in which the tensor is stored."""
    assert layer.source is not None
    assert layer.view is not None
    place = np.ravel_multi_index(pattern.first_bad or (), layer.view.shape)
    return tuple(int(part) for part in np.unravel_index(int(place), layer.source.dims))
