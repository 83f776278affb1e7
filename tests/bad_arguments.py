"""Calls of public functions with one wrong argument: each must end in one line that names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from openwork import files
from openwork.errors import OpenworkError

__all__ = ["NO_PATHS", "leftovers", "refusal", "refuse_to_write", "wrong_calls"]

NO_PATHS: tuple[Any, ...] = (
    None,
    3,
    1.5,
    b"bytes.txt",
    ["a.txt"],
    "",
    "nul\0.txt",
    "lone\ud800.txt",
    "long" * 100,
    object(),
)
"""What is no path of a file."""


def refusal(call: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """The message of the openwork error that a call ends in; fails on any other end."""
    try:
        call(**arguments)
    except OpenworkError as error:
        message = str(error)
    except Exception as error:
        raise AssertionError(f"{call.__name__}: raw {type(error).__name__}: {error}") from error
    else:
        raise AssertionError(f"{call.__name__}: accepted")
    assert message
    assert "\n" not in message, message
    return message


def wrong_calls(
    calls: Mapping[Callable[..., Any], Mapping[str, Any]], names: tuple[str, ...], values: tuple[Any, ...]
) -> Iterator[tuple[Callable[..., Any], str, Any, dict[str, Any]]]:
    """(function, argument, value, arguments): each call with one of the named arguments wrong."""
    for call, arguments in calls.items():
        assert set(arguments) <= set(inspect.signature(call).parameters)
        for name in names:
            for value in values if name in arguments else ():
                yield call, name, value, {**arguments, name: value}


def leftovers(folder: Path, before: set[Path]) -> set[Path]:
    """Files in a folder that were not there before."""
    return {path for path in folder.rglob("*") if path.is_file()} - before


def refuse_to_write(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From now on the disk has no room for files of this name, also not for their temporary ones."""

    def full(real: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **how: Any) -> Any:
            if str(how.get("prefix", "")).startswith(f".{name}."):
                raise OSError(28, "No space left on device")
            return real(*args, **how)

        return make

    for function in ("NamedTemporaryFile", "mkstemp"):
        monkeypatch.setattr(files.tempfile, function, full(getattr(files.tempfile, function)))
