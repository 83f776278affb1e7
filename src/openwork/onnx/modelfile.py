"""An ONNX model whose weights stay in their file until they are needed.

The structure is an ordinary `onnx.ModelProto`; large tensors in it carry a mark instead of data. `ModelFile.array`
gives a tensor's data as a NumPy view of the mapped file, `ModelFile.replace` sets new data, `ModelFile.save` writes
everything, inline or beside the model, without ever holding more than one weight in memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from openwork.errors import ConversionError, FileError
from openwork.files import atomic_path
from openwork.onnx.wire import LiftedField, Placed, assemble, packed_bytes, split
from openwork.sparsity.nibbles import unpack_nibbles

__all__ = ["ModelFile", "Payload", "data_path", "iter_tensors", "tensor_bits", "tensor_type_name"]

_LIMIT = 2**31 - 2**20
"""Bytes above which a model must keep its data in a second file: protobuf reads at most 2 GiB."""
_MOST_AXES = 32
_ALIGN_FROM, _ALIGN = 1 << 20, 4096

_BITS: dict[int, int] = {
    TensorProto.FLOAT: 32,
    TensorProto.DOUBLE: 64,
    TensorProto.FLOAT16: 16,
    TensorProto.BFLOAT16: 16,
    TensorProto.INT8: 8,
    TensorProto.UINT8: 8,
    TensorProto.INT16: 16,
    TensorProto.UINT16: 16,
    TensorProto.INT32: 32,
    TensorProto.UINT32: 32,
    TensorProto.INT64: 64,
    TensorProto.UINT64: 64,
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT8E4M3FN: 8,
    TensorProto.FLOAT8E4M3FNUZ: 8,
    TensorProto.FLOAT8E5M2: 8,
    TensorProto.FLOAT8E5M2FNUZ: 8,
}


_TYPED_FIELDS = ("float_data", "double_data", "int32_data", "int64_data", "uint64_data")


def tensor_bits(data_type: int) -> int | None:
    """Bits per element of a TensorProto data type; None for types that hold no weights (strings, ...)."""
    return _BITS.get(data_type)


def tensor_type_name(data_type: int) -> str:
    """Name of a TensorProto data type, for messages."""
    try:
        return str(TensorProto.DataType.Name(data_type)).lower()
    except ValueError:
        return f"type {data_type}"


def data_path(model: Path) -> Path:
    """The file beside a model that holds its data when the model is too large for one file."""
    return model.with_name(model.name + ".data")


@dataclass(frozen=True)
class Payload:
    """Data of one tensor, made when it is asked for.

    Attributes:
        length: number of bytes.
        content: gives the bytes; called once when the file is written.
        external: the data stands, and shall stand, outside the model's own file.
        field: TensorProto field for data inside the model's file.
    """

    length: int
    content: Callable[[], Any]
    external: bool = False
    field: int = 9


def iter_graphs(model: ModelProto) -> Iterator[GraphProto]:
    """The main graph and all bodies inside it and inside local functions."""
    stack: list[GraphProto] = []
    for function in model.functions:
        for node in function.node:
            stack.extend(_bodies(node))
    stack.append(model.graph)
    while stack:
        graph = stack.pop()
        yield graph
        for node in graph.node:
            stack.extend(_bodies(node))


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH or attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _attribute_tensors(nodes: Any) -> Iterator[tuple[str, TensorProto]]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield f"attribute {attribute.name} of node {node.name or node.op_type!r}", attribute.t
            for tensor in attribute.tensors:
                yield f"attribute {attribute.name} of node {node.name or node.op_type!r}", tensor


def iter_tensors(model: ModelProto) -> Iterator[tuple[str, TensorProto]]:
    """Every dense tensor of the model, with words that say where it is."""
    for graph in iter_graphs(model):
        for tensor in graph.initializer:
            yield f"initializer {tensor.name!r}", tensor
        for sparse in graph.sparse_initializer:
            yield f"sparse initializer {sparse.values.name!r}", sparse.values
            yield f"indices of sparse initializer {sparse.values.name!r}", sparse.indices
        yield from _attribute_tensors(graph.node)
    for function in model.functions:
        yield from _attribute_tensors(function.node)


class ModelFile:
    """See the module.

    Attributes:
        path: where it was read.
        model: the structure. Tensors in it may carry marks: use `array` to read them.
        external: whether some of the data stood outside the model's file.
    """

    def __init__(self, path: Path, model: ModelProto, token: str) -> None:
        self.path = path
        self.model = model
        self.external = False
        self._token = token
        self._payloads: list[Payload] = []
        self._files: dict[Path, Any] = {}
        self._names = 0

    @classmethod
    def load(cls, path: str | os.PathLike[str], what: str = "model") -> ModelFile:
        """Read the structure of a model.

        Raises:
            FileError: missing, a folder, unreadable.
            ConversionError: not an ONNX model; external data missing, too short, or outside the model's folder.
        """
        source = Path(path)
        if os.path.isdir(source):
            raise FileError(f"{what} {source} is a folder; an .onnx file is needed")
        mapped = _map(source, f"{what} {source}")
        token = f"openwork-inline-{secrets.token_hex(12)}:"
        self = cls(source, ModelProto(), token)
        self._files[source] = mapped

        def lift(field: LiftedField) -> str:
            view = memoryview(mapped)[field.start : field.start + field.length]
            return self._mark(Payload(field.length, lambda: view, field=field.field))

        try:
            structure = split(mapped, lift)
            self.model = ModelProto.FromString(structure)
        except (ConversionError, DecodeError) as error:
            reason = str(error) if isinstance(error, ConversionError) else "not an ONNX model, or cut short"
            raise ConversionError(f"{what} {source}: {reason}") from error
        if not self.model.HasField("graph"):
            raise ConversionError(f"{what} {source}: not an ONNX model: there is no graph in it")
        _refuse_broken_text(self.model, f"{what} {source}")
        self._settle_external(what)
        return self

    @property
    def files(self) -> list[Path]:
        """The files that the model is read from."""
        return list(self._files)

    def close(self) -> None:
        """Let go of the mapped files; arrays given out before keep them."""
        self._payloads.clear()
        for mapped in self._files.values():
            with contextlib.suppress(BufferError, AttributeError):
                mapped.close()
        self._files.clear()

    # -- marks -----------------------------------------------------------------------------------------------

    def _mark(self, payload: Payload) -> str:
        self._payloads.append(payload)
        return f"{self._token}{len(self._payloads) - 1}"

    def _payload_of_mark(self, mark: str) -> Payload:
        return self._payloads[int(mark[len(self._token) :])]

    def payload(self, tensor: TensorProto) -> Payload | None:
        """The data of a marked tensor; None when the data stands in the structure."""
        for entry in tensor.external_data:
            if entry.value.startswith(self._token):
                return self._payload_of_mark(entry.value)
        return None

    def _set_mark(self, tensor: TensorProto, payload: Payload) -> None:
        del tensor.external_data[:]
        tensor.ClearField("data_location")
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", self._mark(payload)

    def _settle_external(self, what: str) -> None:
        folder = Path(os.path.realpath(self.path.parent))
        for where, tensor in iter_tensors(self.model):
            marked = any(entry.value.startswith(self._token) for entry in tensor.external_data)
            if marked:
                if tensor.raw_data or tensor.float_data or tensor.double_data:
                    raise ConversionError(f"{what} {self.path}: {where} has data in two places")
                if tensor.data_location == TensorProto.EXTERNAL:
                    raise ConversionError(f"{what} {self.path}: {where} has data both inside and outside")
                continue
            if tensor.data_location != TensorProto.EXTERNAL:
                continue
            self.external = True
            self._set_mark(tensor, self._external_payload(f"{what} {self.path}: {where}", tensor, folder))

    def _external_payload(self, where: str, tensor: TensorProto, folder: Path) -> Payload:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        parts = PurePosixPath(location.replace("\\", "/"))
        if not location or "\0" in location:
            raise ConversionError(f"{where}: external data without a location")
        if parts.is_absolute() or ".." in parts.parts or (len(location) > 1 and location[1] == ":"):
            raise ConversionError(
                f"{where}: external data location {location!r} leaves the model's folder; allowed: a relative path"
            )
        target = folder.joinpath(*parts.parts)
        real = Path(os.path.realpath(target))
        if not real.is_relative_to(folder):
            raise ConversionError(f"{where}: external data location {location!r} leaves the model's folder by a link")
        if real not in self._files:
            self._files[real] = _map(real, f"{where}: external data {location!r}")
        mapped = self._files[real]
        try:
            offset = int(entries.get("offset") or 0)
            length = int(entries["length"]) if entries.get("length") else len(mapped) - offset
        except ValueError:
            raise ConversionError(f"{where}: external data offset or length is no whole number") from None
        if offset < 0 or length < 0 or offset + length > len(mapped):
            raise ConversionError(
                f"{where}: external data {location!r} has {len(mapped):,} bytes; bytes {offset:,} to "
                f"{offset + length:,} are asked for"
            )
        view = memoryview(mapped)[offset : offset + length]
        return Payload(length, lambda: view, external=True)

    # -- data ------------------------------------------------------------------------------------------------

    def nbytes(self, tensor: TensorProto) -> int:
        """Bytes that the tensor's elements take in a file."""
        bits = tensor_bits(tensor.data_type) or 8
        return (_element_count(tensor) * bits + 7) // 8

    def check(self, tensor: TensorProto) -> None:
        """Raise ConversionError if the data does not fit the tensor's shape and type."""
        payload = self.payload(tensor)
        length = payload.length if payload is not None else len(tensor.raw_data)
        typed = any(len(getattr(tensor, name)) for name in _TYPED_FIELDS)
        if payload is None and typed and not length:
            self.array(tensor)
        elif length != self.nbytes(tensor):
            raise self._misfit(tensor, length)

    def _misfit(self, tensor: TensorProto, length: int) -> ConversionError:
        return ConversionError(
            f"{self.path}: tensor {tensor.name!r} of shape {list(tensor.dims)} and type "
            f"{tensor_type_name(tensor.data_type)} needs {self.nbytes(tensor):,} bytes; its data has {length:,}"
        )

    def array(self, tensor: TensorProto) -> npt.NDArray[Any]:
        """The tensor's elements, read-only where they are a view of the file. 4-bit types come as (u)int8.

        Raises:
            ConversionError: the data does not fit the tensor's shape and type.
        """
        count = _element_count(tensor)
        payload = self.payload(tensor)
        name = f"{self.path}: tensor {tensor.name!r}"
        if tensor_bits(tensor.data_type) is None:
            raise ConversionError(f"{name} of {tensor_type_name(tensor.data_type)} holds no numbers")
        four_bits = tensor.data_type in (TensorProto.INT4, TensorProto.UINT4)
        if payload is None and not tensor.raw_data:
            return self._array_of_fields(tensor, count, name, four_bits)
        data: Any = payload.content() if payload is not None else tensor.raw_data
        length = len(data) if not isinstance(data, np.ndarray) else data.nbytes
        if length != self.nbytes(tensor):
            raise self._misfit(tensor, length)
        flat = np.frombuffer(data, np.uint8)
        if four_bits:
            return unpack_nibbles(flat, count, signed=tensor.data_type == TensorProto.INT4).reshape(tensor.dims)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        return flat.view(dtype).reshape(tuple(tensor.dims))

    def _array_of_fields(self, tensor: TensorProto, count: int, name: str, four_bits: bool) -> npt.NDArray[Any]:
        if tensor.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE):
            # By way of Python's numbers a signalling NaN would change: take the bytes.
            number = 4 if tensor.data_type == TensorProto.FLOAT else 10
            data = packed_bytes(tensor.SerializeToString(), number)
            array = np.frombuffer(data, onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
            if array.size != count:
                raise ConversionError(f"{name} of shape {list(tensor.dims)} has {array.size:,} elements")
            return array.reshape(tuple(tensor.dims))
        try:
            array = np.asarray(onnx.numpy_helper.to_array(tensor))
        except Exception as error:
            raise ConversionError(f"{name} cannot be read: {' '.join(str(error).split())[:200]}") from error
        if array.size != count:
            raise ConversionError(f"{name} of shape {list(tensor.dims)} has {array.size:,} elements")
        if four_bits:
            return array.astype(np.int8 if tensor.data_type == TensorProto.INT4 else np.uint8)
        return array

    def replace(self, tensor: TensorProto, dtype: int, dims: tuple[int, ...], payload: Payload) -> None:
        """Give a tensor new contents, kept in `payload` until the file is written."""
        for field in ("raw_data", *_TYPED_FIELDS):
            tensor.ClearField(field)
        del tensor.dims[:]
        tensor.dims.extend(dims)
        tensor.data_type = dtype
        self._set_mark(tensor, payload)

    def is_external(self, tensor: TensorProto) -> bool:
        payload = self.payload(tensor)
        return payload is not None and payload.external

    # -- writing ---------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> list[Path]:
        """Write the model; data that stood outside, or all of it above 2 GiB, goes to ``<name>.data`` beside it.

        Args:
            path: the .onnx file.
            progress: called with (bytes written, bytes in all).

        Returns:
            The files written. On an error none is left behind and older files stay.

        Raises:
            FileError: a file cannot be written.
            ConversionError: a file to be written is one that the model is being read from.
        """
        target = Path(path)
        structure = self.model.SerializeToString()
        token = self._token.encode()

        def inline(mark: str) -> Placed:
            payload = self._payload_of_mark(mark)
            return Placed(0 if payload.external else payload.length, payload, payload.field)

        _, total = assemble(structure, token, inline)
        everything = total > _LIMIT
        beside: list[tuple[int, Payload]] = []
        position = 0
        location = data_path(target).name

        def place(mark: str) -> Placed:
            nonlocal position
            payload = self._payload_of_mark(mark)
            if not (everything or payload.external):
                return Placed(payload.length, payload, payload.field)
            if payload.length >= _ALIGN_FROM:
                position = -(-position // _ALIGN) * _ALIGN
            entries = [("location", location), ("offset", str(position)), ("length", str(payload.length))]
            beside.append((position, payload))
            position += payload.length
            return Placed(payload.length, payload, 0, entries)

        pieces, total = assemble(structure, token, place)
        if total > 2**31 - 1:
            raise ConversionError(f"{target}: the model has {total:,} bytes outside its tensors; 2 GiB at most")
        # An external tensor without marks would be read from the wrong folder; `load` has marked them all.
        written = [target] + ([data_path(target)] if beside else [])
        for file in written:
            if Path(os.path.realpath(file)) in {Path(os.path.realpath(known)) for known in self._files}:
                raise ConversionError(f"{file}: the output would replace the file that is being read; choose another")
        done, goal = 0, total + position

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(done, goal)

        with contextlib.ExitStack() as stack:
            # Entered first, renamed last: the model appears when its data is there.
            model_part = stack.enter_context(atomic_path(target))
            if beside:
                data_part = stack.enter_context(atomic_path(data_path(target)))
                with _open(data_part, data_path(target)) as stream:
                    for offset, payload in beside:
                        stream.seek(offset)
                        _write(stream, payload, advance)
            with _open(model_part, target) as stream:
                for piece in pieces:
                    if isinstance(piece, Payload):
                        _write(stream, piece, advance)
                    else:
                        stream.write(piece)
                        advance(len(piece))
        return written


@contextlib.contextmanager
def _open(part: Path, target: Path) -> Iterator[BinaryIO]:
    try:
        with open(part, "wb", buffering=1 << 20) as stream:
            yield stream
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{target}: cannot be written: {error.strerror or error}") from error


def _write(stream: BinaryIO, payload: Payload, advance: Callable[[int], None]) -> None:
    content = payload.content()
    flat: Any = content
    if isinstance(content, np.ndarray):
        flat = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
    data = memoryview(flat)
    if data.nbytes != payload.length:
        raise ConversionError(f"internal: {data.nbytes} bytes where {payload.length} were announced")
    step = 1 << 24
    for start in range(0, len(data), step):
        stream.write(data[start : start + step])
        advance(min(step, len(data) - start))


def _map(path: Path, what: str) -> Any:
    # Looked at before it is opened: opening a pipe would wait for a writer.
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileError(f"{what} is not a regular file")
    try:
        with open(path, "rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_size == 0:
                return b""
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise FileError(f"{what} does not exist") from error
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{what} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _refuse_broken_text(message: Any, where: str) -> None:
    """Strings that are not UTF-8 come out of protobuf as bytes, and fail much later."""
    for field, value in message.ListFields():
        many = value if field.is_repeated else (value,)
        if field.type == field.TYPE_MESSAGE:
            for inner in many:
                _refuse_broken_text(inner, where)
        elif field.type == field.TYPE_STRING and any(isinstance(text, bytes) for text in many):
            raise ConversionError(f"{where}: not an ONNX model: {field.full_name} is not UTF-8 text")


def _element_count(tensor: TensorProto) -> int:
    count = 1
    if len(tensor.dims) > _MOST_AXES:
        raise ConversionError(f"tensor {tensor.name!r} has {len(tensor.dims)} axes; at most {_MOST_AXES} are read")
    for size in tensor.dims:
        if size < 0:
            raise ConversionError(f"tensor {tensor.name!r} has a negative size in its shape {list(tensor.dims)}")
        count *= size
    return count
