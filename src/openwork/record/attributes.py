"""Named values of a record's nodes, as Python values.

==========  ==================================
AttrType    Python
==========  ==================================
FLOAT       float
INT         int
STRING      str (bytes where it is not UTF-8)
FLOATS      float32 array
INTS        int64 array
STRINGS     tuple of str (or bytes)
==========  ==================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from openwork.errors import RecordError

__all__ = ["AttributeValue", "get_attribute", "read_attributes", "set_attribute"]

AttributeValue = int | float | str | bytes | np.ndarray | tuple[str | bytes, ...]

_FIELD_OF = {"FLOAT": "f", "INT": "i", "STRING": "s", "FLOATS": "floats", "INTS": "ints", "STRINGS": "strings"}


def set_attribute(node: Any, name: str, value: Any) -> None:
    """Set an attribute of a ``PruneNode`` message; its type follows from the Python value.

    Args:
        node: the message; an attribute of this name is replaced, else one is added at the end.
        name: the attribute's name.
        value: see the table above; lists of int, float or str are taken as arrays and tuples.

    Raises:
        RecordError: a value of another kind.
    """
    kind, content = _encode(name, value)
    attribute = next((item for item in node.attr if item.name == name), None)
    if attribute is None:
        attribute = node.attr.add()
    attribute.Clear()
    attribute.name = name
    attribute.type = attribute.DESCRIPTOR.fields_by_name["type"].enum_type.values_by_name[kind].number
    field = _FIELD_OF[kind]
    if kind.endswith("S"):
        getattr(attribute, field).extend(content)
    else:
        setattr(attribute, field, content)


def _encode(name: str, value: Any) -> tuple[str, Any]:
    if isinstance(value, (str, bytes)):
        return "STRING", _to_bytes(value)
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        return "INT", int(value)
    if isinstance(value, (float, np.floating)):
        return "FLOAT", float(value)
    if isinstance(value, (list, tuple)):
        if all(isinstance(item, (str, bytes)) for item in value):
            return "STRINGS", [_to_bytes(item) for item in value]
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iuf":
        return ("FLOATS" if value.dtype.kind == "f" else "INTS"), value.tolist()
    raise RecordError(f"attribute {name!r}: a {type(value).__name__} cannot be written to a record")


def _to_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _from_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def read_attributes(node: Any, where: str) -> dict[str, AttributeValue]:
    """All attributes of a ``PruneNode`` message.

    Args:
        node: the message.
        where: file and node, for messages.

    Raises:
        RecordError: an attribute without name, type or value, given twice, or with a value of another type.
    """
    result: dict[str, AttributeValue] = {}
    for attribute in node.attr:
        name = attribute.name
        if not name:
            raise RecordError(f"{where}: an attribute has no name")
        if name in result:
            raise RecordError(f"{where}: attribute {name!r} is given twice")
        result[name] = _decode(attribute, f"{where}: attribute {name!r}")
    return result


def get_attribute(node: Any, name: str, default: Any = None) -> Any:
    """One attribute of a ``PruneNode`` message, `default` if it has none of this name."""
    for attribute in node.attr:
        if attribute.name == name:
            return _decode(attribute, f"{node.name!r}: attribute {name!r}")
    return default


def _decode(attribute: Any, where: str) -> AttributeValue:
    kinds = attribute.DESCRIPTOR.fields_by_name["type"].enum_type.values_by_number
    kind = kinds[attribute.type].name
    if kind not in _FIELD_OF:
        raise RecordError(f"{where} has no type; allowed: {', '.join(_FIELD_OF)}")
    field = _FIELD_OF[kind]
    present = {item.name for item, _ in attribute.ListFields()} - {"name", "type"}
    if present - {field}:
        raise RecordError(f"{where} has type {kind} but a value of another type ({', '.join(sorted(present))})")
    if not kind.endswith("S"):
        if not present:
            raise RecordError(f"{where} has no value")
        value = getattr(attribute, field)
        return _from_bytes(value) if kind == "STRING" else value
    values = getattr(attribute, field)
    if kind == "STRINGS":
        return tuple(_from_bytes(value) for value in values)
    return np.array(values, dtype=np.int64 if kind == "INTS" else np.float32)


def same_attributes(left: Mapping[str, AttributeValue], right: Mapping[str, AttributeValue]) -> bool:
    """Whether two sets of attributes are equal, arrays included, in order."""
    return list(left) == list(right) and all(
        type(left[name]) is type(right[name]) and np.array_equal(np.asarray(left[name]), np.asarray(right[name]))
        for name in left
    )
