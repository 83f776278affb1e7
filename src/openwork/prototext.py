"""Protobuf text format, read strictly: schemas of our own, and errors that a person can act on.

The message names are those of AMCT, and a process that also imports AMCT has them in protobuf's default pool
already. So each package of ours keeps its compiled schema (``schema.desc``, made from its ``.proto`` files by
``make proto``) in a descriptor pool of its own, and the two never meet.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.descriptor import FieldDescriptor

from openwork.errors import OpenworkError, nearest

__all__ = ["allowed_values", "exact_decimal", "format_float", "load_messages", "parse_text", "quote"]

_UNKNOWN_FIELD = re.compile(r'Message type "([\w.]+)" has no field named "([^"]*)"')
_UNKNOWN_VALUE = re.compile(r'Enum type "([\w.]+)" has no value (?:named|with number) (.+?)\.?$')
_REPEATED = re.compile(r'Message type "([\w.]+)" should not have multiple "(\w+)" fields')
_BOTH = re.compile(r'Field "([\w.]+)" is specified along with field "([\w.]+)", another member of oneof')
_OUT_OF_RANGE = re.compile(r"Value out of range: (\S+)")
_FIELD_BEFORE = re.compile(r"([A-Za-z_]\w*)\s*:?\s*\[?[^:{}<>]*$")


def load_messages(package: str) -> dict[str, Any]:
    """Message classes of the schema beside a package, by their short name.

    Args:
        package: dotted name of the package that holds ``schema.desc``.
    """
    data = resources.files(package).joinpath("schema.desc").read_bytes()
    files = descriptor_pb2.FileDescriptorSet.FromString(data).file
    pool = descriptor_pool.DescriptorPool()
    for file in files:
        pool.AddSerializedFile(file.SerializeToString())
    classes = message_factory.GetMessageClassesForFiles([file.name for file in files], pool)
    return {name.rpartition(".")[2]: kind for name, kind in classes.items()}


# Fields by which a file of another kind, given in the wrong place, is known.
_FILES = {
    "prune_record": "a record, not a config",
    "compress_ratio": "a config of the search",
    "prune_config": "a config of retraining",
    "retrain_data_quant_config": "a config of retraining",
    "retrain_weight_quant_config": "a config of retraining",
}


def parse_text(text: str, kind: Any, source: str, error: type[OpenworkError]) -> Any:
    """Parse a whole text-format file.

    Refused: syntax errors, unknown fields and enum values, values of the wrong type or out of range, a single
    field given twice, two members of a oneof. Required fields are not checked here.

    Args:
        text: the file's content.
        kind: the message class, from `load_messages`.
        source: the file's name, for messages.
        error: the class to raise.

    Returns:
        A message of class `kind`.
    """
    message = kind()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as problem:
        raise error(f"{source}{_explain(problem, text, kind)}") from problem
    except (UnicodeError, ValueError, RecursionError) as problem:
        raise error(f"{source}: not protobuf text: {problem}") from problem
    return message


def _explain(problem: text_format.ParseError, text: str, kind: Any) -> str:
    """One line for a ParseError: where, which field, what is allowed."""
    number, column = problem.GetLine() or 0, problem.GetColumn() or 1
    place = f", line {number}: " if number else ": "
    words = str(problem)
    pool = kind.DESCRIPTOR.file.pool
    if found := _UNKNOWN_FIELD.search(words):
        fields = [field.name for field in pool.FindMessageTypeByName(found[1]).fields]
        hint = f"the file is {_FILES[found[2]]}" if found[2] in _FILES else nearest(found[2], fields)
        return f"{place}unknown field {found[2]!r} in {_short(found[1])}; {hint}"
    if found := _REPEATED.search(words):
        return f"{place}{found[2]} is given twice in one {_short(found[1])}; give it once"
    if found := _BOTH.search(words):
        first, second = sorted((_short(found[1]), _short(found[2])))
        return f"{place}{first} and {second} are both given; only one of them is allowed"
    lines = text.split("\n")[number - 1 :] if number else [""]
    named = _FIELD_BEFORE.search(lines[0][: column - 1])
    field = f"{named[1]}: " if named else ""
    if found := _UNKNOWN_VALUE.search(words):
        names = [value.name for value in pool.FindEnumTypeByName(found[1]).values]
        close = nearest(found[2], names)
        allowed = f"; {close}" if close.startswith("did") else ""
        return f"{place}{field}unknown value {found[2]!r}{allowed} (allowed: {', '.join(names)})"
    if named and (found := _OUT_OF_RANGE.search(words)) and (limits := _limits(kind.DESCRIPTOR, named[1])):
        return f"{place}{named[1]} is {found[1]}; it must be an integer from {limits[0]} to {limits[1]}"
    # What is left of protobuf's own words: drop its place and the quoted line that it puts before them.
    words = re.sub(r"^\d+:\d+ : ", "", words)
    words = words.removeprefix(f"'{lines[0]}': ").removeprefix("'': ").replace("\n", " ")[:200]
    # Protobuf misses a closing bracket only where the text is over, and places that error earlier.
    over = words in ('Expected "}".', 'Expected ">".') or not "".join([lines[0][column - 1 :], *lines[1:]]).strip()
    return f"{place}{field}{'the file ends too early: ' if over else ''}{words}"


def _limits(descriptor: Any, name: str) -> tuple[int, int] | None:
    """The least and greatest value of an integer field, if all fields of that name in the schema have the same."""
    found: set[tuple[int, int]] = set()
    seen: set[str] = set()
    pending = [descriptor]
    while pending:
        message = pending.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        for field in message.fields:
            if field.message_type is not None:
                pending.append(field.message_type)
            elif field.name == name and field.type in _INTEGERS:
                found.add(_INTEGERS[field.type])
    return found.pop() if len(found) == 1 else None


_INTEGERS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}


def _short(full_name: str) -> str:
    return full_name.rpartition(".")[2]


def allowed_values(kind: Any, field: str) -> list[str]:
    """Names of the values of an enum field."""
    return [value.name for value in kind.DESCRIPTOR.fields_by_name[field].enum_type.values]


def exact_decimal(value: float) -> float:
    """The shortest decimal that a float32 field stands for: 0.3, not 0.30000001192092896."""
    return float(str(np.float32(value)))


def format_float(value: float) -> str:
    """Text of a float that reads back as the same number, written as people write it (0.0002, not 2e-04)."""
    plain = value == 0 or 1e-6 <= abs(value) < 1e16
    return np.format_float_positional(value, trim="0") if plain else repr(float(value))


def quote(value: str | bytes) -> str:
    """A string literal in text format; in single quotes where that saves escaping (JSON)."""
    if isinstance(value, bytes):
        try:
            return quote(value.decode())
        except UnicodeDecodeError:
            return '"' + value.decode("latin-1").translate(_BYTE_ESCAPES) + '"'
    if '"' in value and "'" not in value:
        return "'" + value.translate(_INSIDE_SINGLE) + "'"
    return '"' + value.translate(_INSIDE_DOUBLE) + '"'


_INSIDE_SINGLE = {
    **{code: f"\\{code:03o}" for code in (*range(32), 127)},
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    ord("\\"): "\\\\",
}
_INSIDE_DOUBLE = {**_INSIDE_SINGLE, ord('"'): '\\"'}
_BYTE_ESCAPES = {**_INSIDE_DOUBLE, **{code: f"\\{code:03o}" for code in range(128, 256)}}
