"""Protobuf bytes of an ONNX model with the weights taken out, and put back.

A model of a gigabyte is a few kilobytes of structure and a lot of weights. `split` copies the structure and only
notes where large tensor data stands, so that the file can stay on disk (mapped); `assemble` writes the structure
with data put in its place. Nothing but the length-delimited framing is interpreted here.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openwork.errors import ConversionError

__all__ = ["LiftedField", "Placed", "assemble", "packed_bytes", "split", "varint"]

Buffer = Any  # bytes, memoryview or mmap

# Message kind -> field number -> kind of the message inside: the ways that lead to a TensorProto (onnx.proto).
_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _FUNCTION, _TENSOR, _SPARSE, _TRAINING = range(8)
_INSIDE: dict[int, dict[int, int]] = {
    _MODEL: {7: _GRAPH, 20: _TRAINING, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
    _TRAINING: {1: _GRAPH, 2: _GRAPH},
    _TENSOR: {},
}
# Fields of TensorProto whose bytes are the little-endian array itself: float_data (packed), raw_data, double_data.
_DATA_FIELDS = (4, 9, 10)
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14
_MAXIMUM_DEPTH = 90
MINIMUM_LIFTED = 4096
"""Tensor data of fewer bytes stays in the structure."""


@dataclass(frozen=True)
class LiftedField:
    """Where the data of a tensor stands in the original bytes.

    Attributes:
        field: number of the TensorProto field (4 float_data, 9 raw_data, 10 double_data).
        start: first byte.
        length: number of bytes.
    """

    field: int
    start: int
    length: int


@dataclass(frozen=True)
class Placed:
    """What `assemble` shall write for a marked tensor.

    Attributes:
        length: number of bytes.
        content: anything; handed back in the list of pieces at the place of the bytes.
        field: the TensorProto field to write, or 0 when the data goes to an external file.
        external: (key, value) entries of an external tensor.
    """

    length: int
    content: Any
    field: int = 9
    external: Sequence[tuple[str, str]] = ()


def varint(number: int) -> bytes:
    """Protobuf's encoding of an unsigned number."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(buffer: Buffer, at: int, end: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if at >= end or shift > 63:
            raise ConversionError("not an ONNX model, or cut short: the protobuf ends inside a number")
        byte = buffer[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7


def _field(buffer: Buffer, at: int, end: int) -> tuple[int, int, int, int]:
    """(number, wire type, start of the content, end of the field); for wire type 2 the content is the payload."""
    tag, at = _read_varint(buffer, at, end)
    number, kind = tag >> 3, tag & 7
    if number == 0:
        raise ConversionError("not an ONNX model: a protobuf field has the number 0")
    if kind == 0:
        _, stop = _read_varint(buffer, at, end)
    elif kind == 1:
        stop = at + 8
    elif kind == 5:
        stop = at + 4
    elif kind == 2:
        length, at = _read_varint(buffer, at, end)
        stop = at + length
    else:
        raise ConversionError(f"not an ONNX model: protobuf field {number} has wire type {kind}")
    if stop > end:
        raise ConversionError(
            f"not an ONNX model, or cut short: protobuf field {number} needs {stop - end:,} bytes more than there are"
        )
    return number, kind, at, stop


def packed_bytes(message: bytes, number: int) -> bytes:
    """Contents of all length-delimited fields `number` of a message, one after the other."""
    found: list[bytes] = []
    at = 0
    while at < len(message):
        field, wire, content, stop = _field(message, at, len(message))
        if field == number and wire == 2:
            found.append(message[content:stop])
        at = stop
    return b"".join(found)


def split(buffer: Buffer, marker: Callable[[LiftedField], str]) -> bytes:
    """Copy of the model's structure, with a mark in each tensor whose data was left out.

    Args:
        buffer: bytes of a ModelProto.
        marker: gives the mark for a piece of data that is left out. It becomes an external_data entry with the
            key ``location``.

    Returns:
        Bytes of a ModelProto without large tensor data.

    Raises:
        ConversionError: the bytes are no protobuf message of this kind.
    """
    return b"".join(_split(buffer, 0, len(buffer), _MODEL, marker, 0))


def _split(
    buffer: Buffer, start: int, end: int, kind: int, marker: Callable[[LiftedField], str], depth: int
) -> list[bytes]:
    if depth > _MAXIMUM_DEPTH:
        raise ConversionError(f"not an ONNX model: messages are nested more than {_MAXIMUM_DEPTH} deep")
    inside = _INSIDE[kind]
    pieces: list[bytes] = []
    at = copied = start
    while at < end:
        number, wire, content, stop = _field(buffer, at, end)
        if wire == 2 and stop - content >= MINIMUM_LIFTED:
            if number in inside:
                part = _split(buffer, content, stop, inside[number], marker, depth + 1)
                pieces.append(bytes(buffer[copied:at]))
                pieces.append(varint(number << 3 | 2) + varint(sum(map(len, part))))
                pieces.extend(part)
                copied = stop
            elif kind == _TENSOR and number in _DATA_FIELDS:
                mark = marker(LiftedField(number, content, stop - content)).encode()
                entry = b"\x0a\x08location\x12" + varint(len(mark)) + mark
                pieces.append(bytes(buffer[copied:at]))
                pieces.append(varint(_EXTERNAL_DATA << 3 | 2) + varint(len(entry)) + entry)
                copied = stop
        at = stop
    pieces.append(bytes(buffer[copied:end]))
    return pieces


def assemble(structure: bytes, token: bytes, placed: Callable[[str], Placed]) -> tuple[list[Any], int]:
    """Put data back at the marks.

    Args:
        structure: bytes of a ModelProto, marked as by `split`.
        token: bytes that occur in every mark and nowhere else.
        placed: what to write for a mark.

    Returns:
        Pieces in file order, each either bytes or `Placed.content`, and their total length.
    """
    marks: list[int] = []
    at = structure.find(token)
    while at >= 0:
        marks.append(at)
        at = structure.find(token, at + 1)
    return _assemble(structure, 0, len(structure), _MODEL, marks, placed)


def _assemble(
    data: bytes, start: int, end: int, kind: int, marks: list[int], placed: Callable[[str], Placed]
) -> tuple[list[Any], int]:
    inside = _INSIDE[kind]
    pieces: list[Any] = []
    total = 0
    at = copied = start
    while at < end:
        number, wire, content, stop = _field(data, at, end)
        if wire == 2 and number in inside and bisect.bisect(marks, content) != bisect.bisect(marks, stop):
            if inside[number] == _TENSOR:
                part, length = _assemble_tensor(data, content, stop, marks, placed)
            else:
                part, length = _assemble(data, content, stop, inside[number], marks, placed)
            head = data[copied:at] + varint(number << 3 | 2) + varint(length)
            pieces.append(head)
            pieces.extend(part)
            total += len(head) + length
            copied = stop
        at = stop
    pieces.append(data[copied:end])
    return pieces, total + end - copied


def _assemble_tensor(
    data: bytes, start: int, end: int, marks: list[int], placed: Callable[[str], Placed]
) -> tuple[list[Any], int]:
    fields: list[tuple[int, bytes]] = []
    found: Placed | None = None
    at = start
    while at < end:
        number, _, content, stop = _field(data, at, end)
        if number == _EXTERNAL_DATA and bisect.bisect(marks, content) != bisect.bisect(marks, stop):
            # StringStringEntryProto{key "location", value mark}: the value is the last field.
            inner = content
            while inner < stop:
                entry, _, entry_start, entry_stop = _field(data, inner, stop)
                if entry == 2:
                    found = placed(data[entry_start:entry_stop].decode())
                inner = entry_stop
        else:
            fields.append((number, data[at:stop]))
        at = stop
    if found is None:
        return [data[start:end]], end - start
    new: list[tuple[int, list[Any], int]] = []
    if found.field:
        head = varint(found.field << 3 | 2) + varint(found.length)
        new.append((found.field, [head, found.content], len(head) + found.length))
    else:
        fields = [(number, field) for number, field in fields if number != _DATA_LOCATION]
        entries = b""
        for key, value in found.external:
            pair = _string(1, key) + _string(2, value)
            entries += varint(_EXTERNAL_DATA << 3 | 2) + varint(len(pair)) + pair
        new.append((_EXTERNAL_DATA, [entries + varint(_DATA_LOCATION << 3) + b"\x01"], len(entries) + 2))
    pieces: list[Any] = []
    total = 0
    for number, field in fields:
        # Fields stand in the order of their numbers, as every protobuf library writes them.
        while new and new[0][0] < number:
            pieces.extend(new[0][1])
            total += new.pop(0)[2]
        pieces.append(field)
        total += len(field)
    for _, part, length in new:
        pieces.extend(part)
        total += length
    return pieces, total


def _string(number: int, text: str) -> bytes:
    encoded = text.encode()
    return varint(number << 3 | 2) + varint(len(encoded)) + encoded
