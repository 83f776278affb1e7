"""Record text, read and written fast.

Protobuf's parser for text takes about a second for 80,000 integers, and a record lists removed channels and
masks as integers by the hundred thousand. So long runs of ``ints`` are taken out before it parses, converted
by themselves and put back into the message; all else goes through protobuf as it stands.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from openwork.errors import RecordError
from openwork.prototext import exact_decimal, load_messages, parse_text, quote

__all__ = ["messages", "parse_record", "write_record"]

messages = functools.cache(functools.partial(load_messages, "openwork.record"))

_INTEGER = r"-?+(?:0|[1-9]\d*+)(?![\w.])"
# Strings and comments are matched too, so that nothing inside them is taken for a run.
_PIECES = re.compile(
    r"""(?P<other>"(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+'|\#[^\n]*+)"""
    rf"|\bints\s*+:\s*+(?:(?P<lines>{_INTEGER}(?:\s++ints\s*+:\s*+{_INTEGER}){{31,}}+)"
    rf"|\[\s*+(?P<list>{_INTEGER}(?:\s*+,\s*+{_INTEGER}){{31,}}+)\s*+\])"
)
# A run leaves one integer behind, counted up from here: a number that no channel index is.
_PLACEHOLDER = -(1 << 62)
_PLACEHOLDER_DIGITS = str(_PLACEHOLDER)[:14]


def parse_record(text: str, source: str) -> Any:
    """Parse a ``ScaleOffsetRecord``.

    Args:
        text: the file's content.
        source: its name, for messages.

    Raises:
        RecordError: not a record: a syntax error, an unknown field, a value out of range.
    """
    kind = messages()["ScaleOffsetRecord"]
    if _PLACEHOLDER_DIGITS in text:
        return parse_text(text, kind, source, RecordError)
    runs: list[list[int]] = []

    def take(match: re.Match[str]) -> str:
        content = match["lines"] or match["list"]
        if content is None:
            return match[0]
        # Only names, colons and commas stand between the numbers; this is faster than another expression.
        numbers = content.replace("ints", "").replace(":", " ").replace(",", " ").split()
        runs.append(list(map(int, numbers)))
        return f"ints: {_PLACEHOLDER + len(runs) - 1}"

    try:
        record = parse_text(_PIECES.sub(take, text), kind, source, RecordError)
    except RecordError:
        # Again, with all lines in their places, so that the message names the right one.
        parse_text(_PIECES.sub(_keep_lines, text), kind, source, RecordError)
        raise
    if runs:
        _put_back(record, runs, source)
    return record


def _keep_lines(match: re.Match[str]) -> str:
    return match[0] if match["other"] else "ints: 0 " + "\n" * match[0].count("\n")


def _put_back(record: Any, runs: list[list[int]], source: str) -> None:
    last = _PLACEHOLDER + len(runs)
    for node in _nodes(record):
        for attribute in node.attr:
            values = list(attribute.ints)
            if not any(_PLACEHOLDER <= value < last for value in values):
                continue
            del attribute.ints[:]
            for value in values:
                run = runs[value - _PLACEHOLDER] if _PLACEHOLDER <= value < last else [value]
                try:
                    attribute.ints.extend(run)
                except ValueError as error:
                    raise RecordError(
                        f"{source}: {node.name!r}: attribute {attribute.name!r}: an integer of more than 64 bits"
                    ) from error


def _nodes(record: Any) -> Iterator[Any]:
    for group in record.prune_record:
        yield from group.producer
        yield from group.consumer
        if group.HasField("selective_prune"):
            yield group.selective_prune


def write_record(record: Any) -> str:
    """Text of a ``ScaleOffsetRecord``, one value a line, as protobuf itself would write it."""
    parts: list[str] = []
    _write(record, "", parts)
    return "".join(parts)


def _write(message: Any, indent: str, parts: list[str]) -> None:
    for field, value in message.ListFields():
        values = value if field.is_repeated else (value,)
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for item in values:
                parts.append(f"{indent}{field.name} {{\n")
                _write(item, indent + "  ", parts)
                parts.append(f"{indent}}}\n")
        else:
            head = f"{indent}{field.name}: "
            parts.extend(f"{head}{text}\n" for text in _scalars(field, values))


def _scalars(field: Any, values: Iterable[Any]) -> Iterator[str]:
    if field.type == FieldDescriptor.TYPE_ENUM:
        names = field.enum_type.values_by_number
        return (names[value].name for value in values)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return ("true" if value else "false" for value in values)
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return (str(exact_decimal(value)) for value in values)
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return map(quote, values)
    return map(str, values)
