"""Replace operators that qualify by their compressed twins, and note what is needed to undo it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from openwork.convert.detect import Detection
from openwork.convert.layer import Handed, Layer
from openwork.convert.undo import Undo, copy_of
from openwork.onnx.functions import DOMAIN, DOMAIN_VERSION, Layout, Library, StepCopy
from openwork.onnx.modelfile import ModelFile, Payload
from openwork.onnx.scopes import Scope
from openwork.onnx.weights import Source
from openwork.sparsity.nibbles import pack_nibbles
from openwork.sparsity.pack24 import Packed24, pack24, packed_shapes

__all__ = ["PackedParts", "compress"]

_FUNCTION_IR, _OVERLOAD_IR = 8, 10
_FOUR_BITS = (TensorProto.INT4, TensorProto.UINT4)


class PackedParts:
    """Values, index and negative zeros of one stored tensor, packed when the file is written.

    The three are written one after the other, so the packing is kept from the first to the last.
    """

    def __init__(self, file: ModelFile, source: Source, layout: Layout) -> None:
        self._file, self._tensor, self._layout = file, copy_of(source.tensor), layout
        self._packed: Packed24 | None = None
        self._left = 0
        external = file.is_external(source.tensor)
        values, index = packed_shapes(layout.view, layout.axis)
        bits = 4 if layout.data_type in _FOUR_BITS else 8 * _itemsize(layout.data_type)
        size = int(np.prod(values, dtype=object))
        self.values = (values, Payload((size * bits + 7) // 8, self._values, external))
        index_size = int(np.prod(index, dtype=object))
        self.index = (index, Payload(index_size, self._index, external))
        self.signs = (index, Payload(index_size, self._signs, external)) if layout.signs else None

    def packed(self) -> Packed24:
        """The weight in 2:4 storage, freed when each part was taken once."""
        if self._packed is None:
            array = self._file.array(self._tensor).reshape(self._layout.view)
            self._packed = pack24(array, self._layout.axis, zero_point=self._layout.zero_point)
            self._left = 3 if self.signs else 2
        packed = self._packed
        self._left -= 1
        if self._left == 0:
            self._packed = None
        return packed

    def _values(self) -> Any:
        values = self.packed().values
        return pack_nibbles(values) if self._layout.data_type in _FOUR_BITS else values

    def _index(self) -> Any:
        return self.packed().index

    def _signs(self) -> Any:
        packed = self.packed()
        return packed.negative_zeros if packed.negative_zeros is not None else np.zeros_like(packed.index)


def _itemsize(data_type: int) -> int:
    return int(helper.tensor_dtype_to_np_dtype(data_type).itemsize)


def compress(file: ModelFile, detection: Detection) -> list[Layer]:
    """Rewrite `file.model` in place; data is packed when the file is saved.

    Returns:
        The layers that were compressed.
    """
    layers = [layer for layer in detection.layers if layer.reason is None]
    if not layers:
        return []
    model = file.model
    undo = Undo.of(model, detection.scopes)
    library = Library(model.functions)
    taken = _all_names(detection.scopes)
    parts: dict[int, tuple[str, ...]] = {}
    added: dict[int, dict[int, list[Any]]] = defaultdict(dict)
    for same in detection.weights.values():
        first = same[0]
        assert first.source is not None
        names, items = _store(file, first, taken, undo)
        parts[id(first.source.value)] = names
        added[id(first.source.value.scope)][id(first.source.value)] = items
    drop: set[int] = set()
    calls: dict[int, NodeProto] = {}
    handing = _Handing()
    for layer in layers:
        source = layer.source
        assert source is not None
        assert layer.slot is not None
        names = parts[id(source.value)]
        if layer.handed is not None:
            names = handing.add(layer.handed, names, taken)
        if id(layer.node) in calls:
            continue
        steps = [StepCopy(step.node, tuple(step.node.input[1:])) for step in reversed(source.steps)]
        calls[id(layer.node)] = library.call(
            *(layer.node, layer.slot, layer.layout, names, steps, layer.scope.opset),
            nested=layer.scope.root.is_function,
        )
        drop.update(id(step.node) for step in source.steps)
        if source.value.node is not None:
            drop.add(id(source.value.node))
    handing.rewrite(calls, undo)
    # Inner bodies first: the nodes around them are copied with what is in them.
    for scope in reversed(detection.scopes):
        _rewrite_scope(scope, calls, drop, added.get(id(scope), {}), undo, detection.constant_inputs)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in library.constants.items()
    )
    _imports(model, detection.scopes, layers, undo)
    model.functions.extend(library.functions)
    needed = _OVERLOAD_IR if library.overloaded else _FUNCTION_IR
    if model.ir_version < needed:
        model.ir_version = needed
    undo.constants(list(library.constants), len(library.functions))
    undo.store(model)
    return layers


@dataclass
class _Handing:
    """Weights that come into local functions through an input: the parts come in through several."""

    calls: dict[int, tuple[NodeProto, dict[int, tuple[str, ...]]]] = field(default_factory=dict)
    formals: dict[int, tuple[Scope, dict[str, tuple[str, ...]]]] = field(default_factory=dict)

    def add(self, handed: Handed, parts: tuple[str, ...], taken: set[str]) -> tuple[str, ...]:
        """Note one weight; returns the names of its parts inside the function."""
        self.calls.setdefault(id(handed.call), (handed.call, {}))[1][handed.slot] = parts
        _, names = self.formals.setdefault(id(handed.formal.scope), (handed.formal.scope, {}))
        name = handed.formal.name
        if name not in names:
            kinds = ("values", "index", "negative_zeros")[: len(parts)]
            names[name] = tuple(_free(f"{name}.{kind}", taken) for kind in kinds)
        return names[name]

    def rewrite(self, calls: dict[int, NodeProto], undo: Undo) -> None:
        """Change the functions' inputs, and add the changed calls to `calls`."""
        for key, (call, by_slot) in self.calls.items():
            copy = copy_of(call)
            del copy.input[:]
            for slot, name in enumerate(call.input):
                copy.input.extend(by_slot.get(slot, (name,)))
            calls[key] = copy
        for scope, by_name in self.formals.values():
            before = list(scope.holder.input)
            undo.function_inputs(scope, [str(name) for name in before])
            del scope.holder.input[:]
            for name in map(str, before):
                scope.holder.input.extend(by_name.get(name, (name,)))  # type: ignore[arg-type]


def _imports(model: Any, scopes: list[Scope], layers: list[Layer], undo: Undo) -> None:
    holders: list[Any] = [model]
    holders += [scope.holder for scope in scopes if scope.is_function and scope.parent is None]
    used = {id(layer.scope.root.holder) for layer in layers}
    for position, holder in enumerate(holders):
        needed = holder is model or id(holder) in used
        if needed and all(entry.domain != DOMAIN for entry in holder.opset_import):
            holder.opset_import.append(helper.make_opsetid(DOMAIN, DOMAIN_VERSION))
            undo.added_import(position)


def _all_names(scopes: list[Scope]) -> set[str]:
    return {name for scope in scopes for name in scope.values}


def _free(name: str, taken: set[str]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    taken.add(candidate)
    return candidate


def _store(file: ModelFile, layer: Layer, taken: set[str], undo: Undo) -> tuple[tuple[str, ...], list[Any]]:
    """Initializers (or Constant nodes, in a function) for one weight, and their names."""
    source = layer.source
    assert source is not None
    layout = layer.layout
    stem = source.value.name
    packed = PackedParts(file, source, layout)
    kinds = [("values", layout.data_type, packed.values), ("index", TensorProto.UINT8, packed.index)]
    if packed.signs is not None:
        kinds.append(("negative_zeros", TensorProto.UINT8, packed.signs))
    names: list[str] = []
    items: list[Any] = []
    for kind, data_type, (dims, payload) in kinds:
        name = _free(f"{stem}.{kind}", taken)
        tensor = TensorProto()
        file.replace(tensor, data_type, dims, payload)
        names.append(name)
        if source.value.scope.is_function:
            node = helper.make_node("Constant", [], [name])
            attribute = helper.make_attribute("value", TensorProto())
            attribute.t.CopyFrom(tensor)
            node.attribute.append(attribute)
            items.append(node)
        else:
            tensor.name = name
            items.append(tensor)
    undo.weight(file, layer, names)
    return tuple(names), items


def _rewrite_scope(
    scope: Scope,
    calls: dict[int, NodeProto],
    drop: set[int],
    added: dict[int, list[Any]],
    undo: Undo,
    constant_inputs: bool,
) -> None:
    holder = scope.holder
    nodes: list[NodeProto] = []
    new_nodes = [item for items in added.values() for item in items if isinstance(item, NodeProto)]
    new_tensors = [
        item
        for key, items in added.items()
        for item in items
        if isinstance(item, TensorProto) and not _was_initializer(scope, key)
    ]
    changed = bool(added)
    for position, node in enumerate(scope.nodes):
        if id(node) in drop:
            undo.removed_node(scope, position, node)
            changed = True
        elif id(node) in calls:
            undo.replaced_node(scope, position, node)
            nodes.append(calls[id(node)])
            changed = True
        else:
            nodes.append(node)
    if changed:
        kept = [copy_of(node) for node in nodes]
        undo.added_nodes(scope, len(new_nodes))
        del holder.node[:]
        holder.node.extend([*new_nodes, *kept])
    if not isinstance(holder, GraphProto):
        return
    if added:
        tensors: list[TensorProto] = []
        for position, tensor in enumerate(holder.initializer):
            value = scope.values.get(tensor.name)
            items = added.get(id(value)) if value is not None and value.tensor is tensor else None
            if items is None:
                tensors.append(copy_of(tensor))
            else:
                undo.replaced_tensor(scope, position, tensor)
                tensors.extend(items)
        del holder.initializer[:]
        holder.initializer.extend([*tensors, *new_tensors])
    if constant_inputs and scope.parent is None:
        # Above IR version 3 an initializer that is an input, too, may be overridden and is not folded.
        initial = {name for name, value in scope.values.items() if value.tensor is not None}
        for position, info in enumerate(holder.input):
            if info.name in initial:
                undo.removed_input(position, info)
        inputs = [copy_of(info) for info in holder.input if info.name not in initial]
        del holder.input[:]
        holder.input.extend(inputs)


def _was_initializer(scope: Scope, key: int) -> bool:
    return any(id(value) == key and value.tensor is not None for value in scope.values.values())
