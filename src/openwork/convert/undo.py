"""What a compressed model carries so that `restore` gives the original back, bit for bit.

A metadata entry holds the original nodes, tensor headers and inputs with their places. Weight data is not in it: that
comes from values and index.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from openwork.convert.layer import Layer
from openwork.errors import ConversionError
from openwork.onnx.functions import COMPRESSED, DOMAIN
from openwork.onnx.modelfile import ModelFile, Payload
from openwork.onnx.scopes import Scope, read_scopes
from openwork.onnx.weights import constant_tensor
from openwork.sparsity.nibbles import pack_nibbles
from openwork.sparsity.pack24 import Array, unpack24

__all__ = ["KEY", "Undo", "copy_of", "is_compressed", "restore"]

KEY = "openwork.weight_sparse_4_2"
"""The metadata entry."""

_VERSION = 1
_LARGEST = 256 << 20  # bytes of the entry once inflated
_DATA_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "raw_data", "double_data", "uint64_data")
# What reading changed or made-up metadata may end in.
_MISFITS = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    StopIteration,
    DecodeError,
    binascii.Error,
)
_FOUR_BITS = (TensorProto.INT4, TensorProto.UINT4)


class Undo:
    """Collects what `restore` needs while a model is rewritten."""

    def __init__(self) -> None:
        self._data: dict[str, Any] = {
            "version": _VERSION,
            "scopes": {},
            "inputs": [],
            "imports": [],
            "weights": [],
        }
        self._index: dict[int, int] = {}
        self._weight_of: dict[int, int] = {}
        self._sources: dict[int, int] = {}

    @classmethod
    def of(cls, model: ModelProto, scopes: list[Scope]) -> Undo:
        self = cls()
        self._data["ir_version"] = model.ir_version
        self._index = {id(scope): place for place, scope in enumerate(scopes)}
        return self

    def _scope(self, scope: Scope) -> dict[str, Any]:
        place = str(self._index[id(scope)])
        entry: dict[str, Any] = self._data["scopes"].setdefault(
            place, {"removed": [], "replaced": [], "tensors": [], "added": 0}
        )
        return entry

    def weight(self, file: ModelFile, layer: Layer, names: list[str]) -> None:
        """A stored tensor that was packed, and the names of its parts."""
        source, view = layer.source, layer.view
        assert source is not None
        assert view is not None
        payload = file.payload(source.tensor)
        if payload is not None:
            storage = {4: "float_data", 10: "double_data"}.get(payload.field, "raw_data")
        else:
            storage = next((name for name in _DATA_FIELDS if _holds(source.tensor, name)), "raw_data")
        number = len(self._data["weights"])
        self._data["weights"].append(
            {
                "header": _encode(_header(source.tensor)),
                "storage": storage,
                "parts": names,
                "view": list(view.shape),
                "axis": view.axis,
                "zero_point": layer.zero_point,
            }
        )
        self._sources[id(source.tensor)] = number
        if source.value.node is not None:
            self._sources[id(source.value.node)] = number

    def removed_node(self, scope: Scope, position: int, node: NodeProto) -> None:
        weight = self._sources.get(id(node), -1)
        if weight >= 0:
            copy = NodeProto()
            copy.CopyFrom(node)
            for attribute in copy.attribute:
                if attribute.name == "value":
                    attribute.ClearField("t")
            node = copy
        self._scope(scope)["removed"].append([position, _encode(node), weight])

    def replaced_node(self, scope: Scope, position: int, node: NodeProto) -> None:
        self._scope(scope)["replaced"].append([position, _encode(node)])

    def function_inputs(self, scope: Scope, names: list[str]) -> None:
        """What the inputs of a local function were."""
        self._scope(scope)["inputs"] = names

    def added_nodes(self, scope: Scope, count: int) -> None:
        self._scope(scope)["added"] = count

    def replaced_tensor(self, scope: Scope, position: int, tensor: TensorProto) -> None:
        self._scope(scope)["tensors"].append([position, self._sources[id(tensor)]])

    def removed_input(self, position: int, info: ValueInfoProto) -> None:
        self._data["inputs"].append([position, _encode(info)])

    def added_import(self, holder: int) -> None:
        """0 for the model, else 1 + the place of a local function."""
        self._data["imports"].append(holder)

    def constants(self, names: list[str], functions: int) -> None:
        self._data["constants"] = names
        self._data["functions"] = functions

    def store(self, model: ModelProto) -> None:
        text = json.dumps(self._data, separators=(",", ":")).encode()
        entry = model.metadata_props.add()
        entry.key = KEY
        entry.value = base64.b64encode(zlib.compress(text, 9)).decode()


def _holds(tensor: TensorProto, name: str) -> bool:
    return len(getattr(tensor, name)) > 0


def _header(tensor: TensorProto) -> TensorProto:
    header = TensorProto()
    header.CopyFrom(tensor)
    for name in (*_DATA_FIELDS, "external_data", "data_location"):
        header.ClearField(name)
    return header


def _encode(message: Any) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


def is_compressed(model: ModelProto) -> bool:
    """Whether `restore` has something to do."""
    return any(entry.key == KEY for entry in model.metadata_props)


def restore(file: ModelFile) -> int:
    """Undo the compression of `file.model` in place; weights are unpacked when the file is saved.

    Returns:
        The number of weights that will be unpacked.

    Raises:
        ConversionError: the model was not written by ``openwork convert``, or was changed since.
    """
    model = file.model
    if not is_compressed(model):
        raise ConversionError(f"{file.path}: nothing to decompress: the model was not compressed by openwork convert")
    try:
        return _restore(file, _read_entry(model))
    except _MISFITS as error:
        if isinstance(error, ConversionError):
            raise
        raise _damaged(file) from error


def _damaged(file: ModelFile) -> ConversionError:
    return ConversionError(f"{file.path}: the metadata {KEY!r} does not fit the model: it was changed since")


def _read_entry(model: ModelProto) -> dict[str, Any]:
    text = next(entry.value for entry in model.metadata_props if entry.key == KEY)
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(base64.b64decode(text, validate=True), _LARGEST)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if inflater.unconsumed_tail or not inflater.eof:
        raise ValueError("too large, or cut short")
    data: dict[str, Any] = json.loads(raw)
    if data["version"] != _VERSION:
        raise ConversionError(f"the model was compressed by another version of openwork ({data['version']!r})")
    return data


def _restore(file: ModelFile, data: dict[str, Any]) -> int:
    model = file.model
    scopes = read_scopes(model)
    weights = [_Weight(file, entry, scopes) for entry in data["weights"]]
    for place, entry in sorted(data["scopes"].items(), key=lambda item: -int(item[0])):
        scope = scopes[int(place)]
        _restore_nodes(file, scope, entry, weights)
        if isinstance(scope.holder, GraphProto):
            _restore_tensors(file, scope.holder, entry, weights)
        elif "inputs" in entry:
            del scope.holder.input[:]
            scope.holder.input.extend(entry["inputs"])
    graph = model.graph
    constants = set(data["constants"])
    kept = [copy_of(tensor) for tensor in graph.initializer if tensor.name not in constants]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    inputs = [copy_of(info) for info in graph.input]
    for position, text in data["inputs"]:
        inputs.insert(position, ValueInfoProto.FromString(base64.b64decode(text)))
    del graph.input[:]
    graph.input.extend(inputs)
    if data["functions"]:
        if any(function.domain != DOMAIN for function in model.functions[-data["functions"] :]):
            raise _damaged(file)
        del model.functions[-data["functions"] :]
    for holder in data["imports"]:
        imports = (model if holder == 0 else model.functions[holder - 1]).opset_import
        del imports[next(place for place, found in enumerate(imports) if found.domain == DOMAIN)]
    model.ir_version = data["ir_version"]
    del model.metadata_props[next(place for place, entry in enumerate(model.metadata_props) if entry.key == KEY)]
    return len(weights)


class _Weight:
    """A stored tensor made again from its parts."""

    def __init__(self, file: ModelFile, entry: dict[str, Any], scopes: list[Scope]) -> None:
        self._file = file
        self._header = TensorProto.FromString(base64.b64decode(entry["header"]))
        self._storage = entry["storage"]
        self._view = tuple(int(size) for size in entry["view"])
        self._axis = int(entry["axis"])
        self._zero_point = int(entry["zero_point"])
        self.names = [str(name) for name in entry["parts"]]
        self._parts = []
        for name in self.names:
            value = next((scope.values[name] for scope in scopes if name in scope.values), None)
            tensor = constant_tensor(value, True) if value is not None else None
            if tensor is None:
                raise ValueError(name)
            copy = TensorProto()
            copy.CopyFrom(tensor)
            self._parts.append(copy)
        if self._parts[0].data_type != self._header.data_type:
            raise ValueError("type")
        if int(np.prod(self._view, dtype=object)) != int(np.prod(list(self._header.dims), dtype=object)):
            raise ValueError("shape")

    def array(self) -> Array:
        arrays = [self._file.array(part) for part in self._parts]
        dense = unpack24(
            arrays[0],
            arrays[1],
            self._view[self._axis],
            self._axis,
            zero_point=self._zero_point,
            negative_zeros=arrays[2] if len(arrays) > 2 else None,
        )
        if dense.shape != self._view:
            raise _damaged(self._file)
        return dense

    def tensor(self) -> TensorProto:
        """The original tensor; large data is made when the file is written."""
        result = copy_of(self._header)
        if self._storage in ("raw_data", "float_data", "double_data"):
            field = {"float_data": 4, "double_data": 10}.get(self._storage, 9)
            external = self._file.is_external(self._parts[0])
            payload = Payload(self._file.nbytes(result), self._bytes, external, field)
            self._file.replace(result, result.data_type, tuple(result.dims), payload)
            return result
        raw = self._bytes()
        if result.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            raw = raw.view(np.uint16)
        getattr(result, self._storage).extend(raw.reshape(-1).tolist())
        return result

    def _bytes(self) -> Array:
        dense = self.array()
        return pack_nibbles(dense) if self._header.data_type in _FOUR_BITS else dense


def copy_of(message: Any) -> Any:
    """A copy of a protobuf message that belongs to no other message."""
    result = type(message)()
    result.CopyFrom(message)
    return result


def _restore_nodes(file: ModelFile, scope: Scope, entry: dict[str, Any], weights: list[_Weight]) -> None:
    current = iter(scope.nodes[int(entry["added"]) :])
    stored: dict[int, tuple[str, int, bool]] = {}
    for position, text, weight in entry["removed"]:
        stored[position] = (text, weight, False)
    for position, text in entry["replaced"]:
        stored[position] = (text, -1, True)
    total = len(scope.nodes) - int(entry["added"]) + len(entry["removed"])
    nodes: list[NodeProto] = []
    for position in range(total):
        if position not in stored:
            nodes.append(copy_of(next(current)))
            continue
        text, weight, replaced = stored[position]
        node = NodeProto.FromString(base64.b64decode(text))
        if replaced:
            twin = next(current)
            name = COMPRESSED.get(node.op_type, "")
            compressed = twin.domain == DOMAIN and (twin.op_type == name or twin.op_type.startswith(f"{name}_v"))
            # A call of a local function that was handed the parts of a weight.
            if not compressed and (twin.domain, twin.op_type) != (node.domain, node.op_type):
                raise _damaged(file)
        if weight >= 0:
            for attribute in node.attribute:
                if attribute.name == "value" and attribute.type == AttributeProto.TENSOR:
                    attribute.t.CopyFrom(weights[weight].tensor())
        nodes.append(node)
    del scope.holder.node[:]
    scope.holder.node.extend(nodes)


def _restore_tensors(file: ModelFile, graph: GraphProto, entry: dict[str, Any], weights: list[_Weight]) -> None:
    # Parts of weights that were Constant nodes stand in the initializers, too: they go without a tensor in return.
    parts = {name for weight in weights for name in weight.names}
    tensors = [copy_of(tensor) for tensor in graph.initializer if tensor.name not in parts]
    for position, number in entry["tensors"]:
        tensors.insert(position, weights[number].tensor())
    del graph.initializer[:]
    graph.initializer.extend(tensors)
