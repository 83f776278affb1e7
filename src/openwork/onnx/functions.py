"""Model-local functions that compute compressed operators with standard ones: decode the weight, then the operator.

    code -> table[256, 8] -> which of four values (or the zero column) each element takes -> GatherElements

A runtime that knows no such operator inlines the function; since values and index are constants, it folds the
decoding away when it loads the model. One function serves all layers of a kind: what differs from layer to layer is
handed over by attributes. Below opset 12 attributes cannot become tensors, so that shapes come as inputs, and
GatherElements (opset 11) is a Gather at computed places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import AttributeProto, FunctionProto, NodeProto, TensorProto, helper, numpy_helper

from openwork.sparsity._index import source_table

__all__ = ["ALGORITHM", "COMPRESSED", "DOMAIN", "MODERN_OPSET", "Layout", "Library", "StepCopy"]

DOMAIN = "openwork"
DOMAIN_VERSION = 1
ALGORITHM = "weight_sparse_4_2"
MODERN_OPSET = 12
"""From this opset on `Constant` takes lists from attributes."""

COMPRESSED = {
    "Conv": "Conv2DCompress",
    "ConvInteger": "Conv2DCompress",
    "QLinearConv": "Conv2DCompress",
    "ConvTranspose": "Conv2DTransposeDCompress",
    "Gemm": "FullyConnectionCompress",
    "MatMul": "MatMulV2Compress",
    "MatMulInteger": "MatMulV2Compress",
    "QLinearMatMul": "MatMulV2Compress",
}
"""Operator -> name of its compressed twin."""

_FORMALS = {
    "Conv": ("x", "filter", "bias"),
    "ConvTranspose": ("x", "filter", "bias"),
    "Gemm": ("x", "w", "b"),
    "MatMul": ("x1", "x2"),
    "ConvInteger": ("x", "filter", "x_zero_point", "w_zero_point"),
    "MatMulInteger": ("x1", "x2", "x1_zero_point", "x2_zero_point"),
    "QLinearConv": (
        *("x", "x_scale", "x_zero_point", "filter", "w_scale", "w_zero_point"),
        *("y_scale", "y_zero_point", "bias"),
    ),
    "QLinearMatMul": (
        *("x1", "x1_scale", "x1_zero_point", "x2", "x2_scale", "x2_zero_point"),
        *("y_scale", "y_zero_point"),
    ),
}
_FOUR_BITS = (TensorProto.INT4, TensorProto.UINT4)


@dataclass(frozen=True)
class Layout:
    """How a stored tensor was packed.

    Attributes:
        data_type: TensorProto type of the stored tensor.
        dims: its shape.
        view: the shape it was packed in (same elements, C order).
        axis: the packed axis of the view.
        zero_point: the value that the unstored elements have.
        signs: negative zeros are stored, too.
    """

    data_type: int
    dims: tuple[int, ...]
    view: tuple[int, ...]
    axis: int
    zero_point: int = 0
    signs: bool = False

    @property
    def cin(self) -> int:
        return self.view[self.axis]

    @property
    def padded(self) -> int:
        return -(-self.cin // 8) * 8

    @property
    def rest(self) -> tuple[int, ...]:
        return self.view[: self.axis] + self.view[self.axis + 1 :]

    @property
    def inverse(self) -> tuple[int, ...]:
        """The perm that moves the last axis back to its place."""
        last = len(self.view) - 1
        return (*range(self.axis), last, *range(self.axis, last))

    @property
    def steps(self) -> tuple[bool, bool, bool]:
        """Which of cutting padding off, moving the axis back and reshaping decoding needs.

        Each costs a copy of the weight when a runtime loads the model.
        """
        return self.cin != self.padded, self.axis != len(self.view) - 1, self.view != self.dims

    @property
    def index_bytes(self) -> int:
        return int(np.prod(self.rest, dtype=object)) * self.padded // 8


@dataclass(frozen=True)
class StepCopy:
    """A node between the stored tensor and the operator, to be repeated inside the function.

    Attributes:
        node: the original.
        inputs: names, at the place of the call, of its inputs from the second on.
    """

    node: NodeProto
    inputs: tuple[str, ...]


@dataclass
class _Body:
    """Nodes of a function under construction."""

    nodes: list[NodeProto] = field(default_factory=list)

    def constant(self, name: str, array: npt.NDArray[Any]) -> str:
        tensor = numpy_helper.from_array(array)
        self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return name

    def constant_of(self, name: str, attribute: str) -> str:
        node = helper.make_node("Constant", [], [name])
        node.attribute.append(_reference("value_ints", attribute, AttributeProto.INTS))
        self.nodes.append(node)
        return name

    def add(self, operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output


def _reference(name: str, parameter: str, kind: Any) -> AttributeProto:
    result = AttributeProto()
    result.name, result.ref_attr_name, result.type = name, parameter, kind
    return result


def _bare(node: NodeProto) -> bytes:
    """What of a step its function depends on."""
    copy = NodeProto()
    copy.op_type = node.op_type
    copy.attribute.extend(sorted(node.attribute, key=lambda item: item.name))
    copy.input.extend("x" if name else "" for name in node.input)
    return copy.SerializeToString(deterministic=True)


class Library:
    """The functions that one model needs, and its shared small constants.

    Attributes:
        functions: in the order in which they were first needed.

    Args:
        present: functions that the model has already.
    """

    def __init__(self, present: Iterable[FunctionProto] = ()) -> None:
        self.functions: list[FunctionProto] = []
        # Functions of the model itself: two of one name must differ by their overload.
        self._taken = {(function.domain, function.name, function.overload) for function in present}
        self._known: dict[Any, FunctionProto] = {}
        self._nested: dict[Any, FunctionProto] = {}
        self._constants: dict[str, npt.NDArray[Any]] = {}

    @property
    def overloaded(self) -> bool:
        """Two functions have one name, so that the model needs IR version 10."""
        return any(function.overload for function in self.functions)

    @property
    def constants(self) -> dict[str, npt.NDArray[Any]]:
        """Initializers that calls below opset 12 read, by name."""
        return self._constants

    def call(
        self,
        node: NodeProto,
        slot: int,
        layout: Layout,
        parts: tuple[str, ...],
        steps: Sequence[StepCopy],
        opset: int,
        nested: bool = False,
    ) -> NodeProto:
        """The compressed twin of an operator; its function is made if there is none yet.

        Args:
            node: Conv, Gemm, MatMul, ConvTranspose or an integer kind of these.
            slot: the input that holds the weight.
            layout: how the weight is packed.
            parts: names of values, index and, if ``layout.signs``, negative zeros.
            steps: nodes between the stored tensor and the operator, nearest to the stored tensor first.
            opset: version of the default domain at the node's place.
            nested: the node is in a local function. There, onnxruntime looks functions up by name alone, so that
                a second kind needs a name of its own instead of an overload.
        """
        stem = _FORMALS[node.op_type][slot]
        formals: list[str] = []
        actual: list[str] = []
        operands: list[str] = []
        # An input that is left out must be left out inside as well: runtimes fuse `Conv(x, w)`, not `Conv(x, w, "")`.
        for formal, name in zip(_FORMALS[node.op_type], node.input, strict=False):
            operands.append(formal if name else "")
            if formal == stem:
                formals += [f"{stem}_compress", "compress_index"] + ["negative_zeros"] * layout.signs
                actual += parts
            elif name:
                formals.append(formal)
                actual.append(name)
        for place, step in enumerate(steps):
            for position, name in enumerate(step.inputs):
                if name:
                    formals.append(f"step{place}_{position + 1}")
                    actual.append(name)
        modern = opset >= MODERN_OPSET
        if not modern:
            for formal, name in self._legacy_inputs(layout, opset):
                formals.append(formal)
                actual.append(name)
        kinds = tuple(sorted((found.name, found.type) for found in node.attribute))
        key = (
            *(node.op_type, slot, kinds, layout.data_type, layout.zero_point, layout.signs, opset),
            *(_index_type(layout), layout.steps, tuple(operands)),
            tuple(_bare(step.node) for step in steps),
        )
        function = self._known.get(key)
        if nested and (function is None or function.overload):
            function = self._nested.get(key)
        if function is None:
            body = self._function(node, stem, formals, operands, layout, steps, opset, kinds)
            function = self._named(body, nested, key)
        call = NodeProto()
        call.CopyFrom(node)
        call.op_type, call.domain, call.overload = function.name, DOMAIN, function.overload
        del call.input[:]
        call.input.extend(actual)
        call.attribute.append(helper.make_attribute("alg", ALGORITHM))
        for name, value in _layout_attributes(layout).items():
            call.attribute.append(helper.make_attribute(name, value))
        return call

    def _named(self, body: FunctionProto, nested: bool, key: Any) -> FunctionProto:
        """Give a new function a name and overload that are free, and keep it."""
        stem, number = body.name, 1
        while (DOMAIN, body.name, body.overload) in self._taken:
            number += 1
            if nested:
                body.name = f"{stem}_v{number}"
            else:
                body.overload = f"v{number}"
        self._taken.add((DOMAIN, body.name, body.overload))
        self.functions.append(body)
        (self._nested if nested and number > 1 else self._known)[key] = body
        return body

    def _legacy_inputs(self, layout: Layout, opset: int) -> list[tuple[str, str]]:
        """Initializers for a call below opset 12, as (formal, actual) names."""
        columns = 5 + layout.signs
        rows = layout.index_bytes
        high = _near_root(rows)
        low = rows // high
        wide = helper.tensor_dtype_to_np_dtype(_index_type(layout)).type
        number = np.dtype(wide).name
        entries: dict[str, tuple[str, npt.NDArray[Any]]] = {
            "table": (f"table.{number}", source_table().astype(wide)),
            "high": (f"high.{high}.{low}.{columns}", (np.arange(high) * low * columns).astype(wide)[:, None]),
            "low": (f"low.{low}.{columns}", (np.arange(low) * columns).astype(wide)[None, :]),
            "nought": (f"nought.{number}", np.zeros(1, wide)),
            "zero": (f"zero.{layout.data_type}.{layout.zero_point}", _zero(layout)),
            "flat": ("flat", np.array([-1], np.int64)),
            "column": ("column", np.array([-1, 1], np.int64)),
            "fours": ("fours", np.array([-1, 4], np.int64)),
            "padded_rows": (f"rows.{layout.padded}", np.array([-1, layout.padded], np.int64)),
            "moved_shape": (_name("shape", (*layout.rest, layout.cin)), np.array([*layout.rest, layout.cin])),
            "weight_shape": (_name("shape", layout.dims), np.array(layout.dims, np.int64)),
        }
        if layout.signs:
            entries["minus"] = (f"minus.{layout.data_type}", -_zero(layout))
            entries["bits"] = (f"bits.{number}", _bit_table().astype(wide))
        if opset >= 10:
            entries["starts"] = ("starts", np.array([0], np.int64))
            entries["axes"] = ("axes", np.array([1], np.int64))
            entries["ends"] = (f"ends.{layout.cin}", np.array([layout.cin], np.int64))
        result = []
        for formal, (name, array) in entries.items():
            full = f"openwork.{name}"
            self._constants.setdefault(full, array)
            result.append((formal, full))
        return result

    def legacy_bytes(self, layout: Layout, opset: int) -> int:
        """Bytes of constants that only this layer needs below opset 12."""
        if opset >= MODERN_OPSET:
            return 0
        rows = max(1, layout.index_bytes)
        high = _near_root(rows)
        return 4 * (high + rows // high)

    def _function(
        self,
        node: NodeProto,
        stem: str,
        formals: list[str],
        operands: list[str],
        layout: Layout,
        steps: Sequence[StepCopy],
        opset: int,
        kinds: tuple[tuple[str, Any], ...],
    ) -> FunctionProto:
        body = _Body()
        weight = _decode(body, f"{stem}_compress", layout, opset)
        for place, step in enumerate(steps):
            copy = NodeProto()
            copy.op_type = step.node.op_type
            copy.attribute.extend(step.node.attribute)
            copy.input.append(weight)
            for position, name in enumerate(step.inputs):
                copy.input.append(f"step{place}_{position + 1}" if name else "")
            weight = f"after_step{place}"
            copy.output.append(weight)
            body.nodes.append(copy)
        operator = helper.make_node(node.op_type, [weight if n == stem else n for n in operands], ["y"])
        for name, kind in kinds:
            operator.attribute.append(_reference(name, name, kind))
        body.nodes.append(operator)
        attributes = ["alg", *_layout_attributes(layout), *(name for name, _ in kinds)]
        return helper.make_function(
            DOMAIN,
            COMPRESSED[node.op_type],
            formals,
            ["y"],
            body.nodes,
            [onnx.helper.make_opsetid("", opset)],
            attributes,
            doc_string=f"{node.op_type} with a 2:4 weight ({ALGORITHM}): decoded, then computed as usual.",
        )


def _near_root(number: int) -> int:
    """The largest divisor of a number that is not above its square root; 1 for 0."""
    root = max(1, math.isqrt(number))
    while number % root:
        root -= 1
    return root


def _name(kind: str, numbers: Sequence[int]) -> str:
    return ".".join([kind, *map(str, numbers)])


def _layout_attributes(layout: Layout) -> dict[str, Any]:
    return {
        "cin": [layout.cin],
        "padded_rows": [-1, layout.padded],
        "moved_shape": [*layout.rest, layout.cin],
        "perm": list(layout.inverse),
        "weight_shape": list(layout.dims),
    }


def _index_type(layout: Layout) -> int:
    """Type of computed places in all slots of a layer, below opset 12."""
    small = (5 + layout.signs) * (layout.index_bytes + 1) < 2**31
    return int(TensorProto.INT32 if small else TensorProto.INT64)


def _zero(layout: Layout) -> npt.NDArray[Any]:
    if layout.data_type in _FOUR_BITS:
        return np.array([layout.zero_point], np.int8 if layout.data_type == TensorProto.INT4 else np.uint8)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(layout.data_type)
    return np.array([layout.zero_point]).astype(dtype)


def _bit_table() -> npt.NDArray[np.int8]:
    """int8 [256, 8]: the bits of a byte, lowest first."""
    return np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.int8)


def _decode(body: _Body, values: str, layout: Layout, opset: int) -> str:
    """Nodes from values and index to the stored tensor; returns its name."""
    four_bits = layout.data_type in _FOUR_BITS
    if four_bits:
        # Gathering is not defined for 4-bit types.
        wide = TensorProto.INT8 if layout.data_type == TensorProto.INT4 else TensorProto.UINT8
        values = body.add("Cast", [values], "wide_values", to=wide)
    elements = _gather_modern(body, values, layout) if opset >= MODERN_OPSET else _gather_legacy(body, values, layout)
    cut, transposed, viewed = layout.steps
    if opset >= MODERN_OPSET:
        if cut:
            body.constant_of("padded_rows", "padded_rows")
            body.constant_of("ends", "cin")
            body.constant("starts", np.array([0], np.int64))
            body.constant("axes", np.array([1], np.int64))
        if transposed:
            body.constant_of("moved_shape", "moved_shape")
        if viewed or not transposed:
            body.constant_of("weight_shape", "weight_shape")
    weight = elements
    if cut:
        weight = body.add("Reshape", [weight, "padded_rows"], "rows")
        if opset >= 10:
            weight = body.add("Slice", [weight, "starts", "ends", "axes"], "true_rows")
        else:
            weight = body.add("Slice", [weight], "true_rows", starts=[0], axes=[1])
            body.nodes[-1].attribute.append(_reference("ends", "cin", AttributeProto.INTS))
    if transposed:
        weight = body.add("Reshape", [weight, "moved_shape"], "moved")
        weight = body.add("Transpose", [weight], "view")
        body.nodes[-1].attribute.append(_reference("perm", "perm", AttributeProto.INTS))
    if viewed or not transposed:
        weight = body.add("Reshape", [weight, "weight_shape"], "weight")
    if four_bits:
        weight = body.add("Cast", [weight], "weight_4bit", to=layout.data_type)
    return weight


def _table(body: _Body, name: str, table: npt.NDArray[np.int8]) -> str:
    """An int32 [256, 8] table whose halves depend on one nibble each, made from two tables of 16: 2 kB less."""
    low, high = table[:16, :4], table[::16, 4:]
    low_rows = body.constant(f"{name}_low", low)
    high_rows = body.constant(f"{name}_high", high)
    below = body.constant(f"{name}_below", np.array([16, 1], np.int64))
    beside = body.constant(f"{name}_beside", np.array([1, 16], np.int64))
    rows = body.constant(f"{name}_rows", np.array([256, 4], np.int64))
    low_half = body.add("Tile", [low_rows, below], f"{name}_low_half")
    high_half = body.add("Tile", [high_rows, beside], f"{name}_high_tiled")
    high_half = body.add("Reshape", [high_half, rows], f"{name}_high_half")
    whole = body.add("Concat", [low_half, high_half], f"{name}8", axis=1)
    return body.add("Cast", [whole], name, to=TensorProto.INT32)


def _gather_modern(body: _Body, values: str, layout: Layout) -> str:
    body.constant("flat", np.array([-1], np.int64))
    body.constant("fours", np.array([-1, 4], np.int64))
    body.constant("one", np.array([1], np.int64))
    table = _table(body, "table", source_table())
    codes = body.add("Reshape", ["compress_index", "flat"], "codes8")
    codes = body.add("Cast", [codes], "codes", to=TensorProto.INT32)
    places = body.add("Gather", [table, codes], "places", axis=0)
    slots = body.add("Reshape", [values, "fours"], "slots")
    count = body.add("Shape", [codes], "count")
    column = body.add("Concat", [count, "one"], "column", axis=0)
    # A column of zeros of any type: Expand is not there for bfloat16 in every runtime, Gather is.
    nought = helper.make_tensor("nought", TensorProto.INT32, [1], [0])
    noughts = body.add("ConstantOfShape", [column], "noughts", value=nought)
    zero = body.constant("zero", _zero(layout))
    columns = [slots, body.add("Gather", [zero, noughts], "zeros", axis=0)]
    if layout.signs:
        minus = body.constant("minus", -_zero(layout))
        columns.append(body.add("Gather", [minus, noughts], "minus_zeros", axis=0))
        bits = _table(body, "bits", _bit_table())
        signs = body.add("Reshape", ["negative_zeros", "flat"], "signs8")
        signs = body.add("Cast", [signs], "signs", to=TensorProto.INT32)
        signs = body.add("Gather", [bits, signs], "sign_bits", axis=0)
        places = body.add("Add", [places, signs], "signed_places")
    slots = body.add("Concat", columns, "slots_and_zero", axis=1)
    return body.add("GatherElements", [slots, places], "elements", axis=1)


def _gather_legacy(body: _Body, values: str, layout: Layout) -> str:
    kind = _index_type(layout)
    codes = body.add("Reshape", ["compress_index", "flat"], "codes8")
    codes = body.add("Cast", [codes], "codes", to=kind)
    places = body.add("Gather", ["table", codes], "places", axis=0)
    if layout.signs:
        signs = body.add("Reshape", ["negative_zeros", "flat"], "signs8")
        signs = body.add("Cast", [signs], "signs", to=kind)
        signs = body.add("Gather", ["bits", signs], "sign_bits", axis=0)
        places = body.add("Add", [places, signs], "signed_places")
    start = body.add("Add", ["high", "low"], "start")
    start = body.add("Reshape", [start, "column"], "start_column")
    places = body.add("Add", [places, start], "absolute")
    noughts = body.add("Mul", [start, "nought"], "noughts")
    slots = body.add("Reshape", [values, "fours"], "slots")
    columns = [slots, body.add("Gather", ["zero", noughts], "zeros", axis=0)]
    if layout.signs:
        columns.append(body.add("Gather", ["minus", noughts], "minus_zeros", axis=0))
    slots = body.add("Concat", columns, "slots_and_zero", axis=1)
    slots = body.add("Reshape", [slots, "flat"], "all_slots")
    return body.add("Gather", [slots, places], "elements", axis=0)
