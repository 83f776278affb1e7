"""Exceptions of openwork.

Each is a subclass of the built-in that a caller would expect (`ValueError`, `RuntimeError`, ...), so that
code may catch either. A message is one line: where (file, field, layer, option), the value, what is allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "ConfigError",
    "ConversionError",
    "FileError",
    "ModelError",
    "NothingToPruneError",
    "OpenworkError",
    "RecordError",
    "UnsupportedModelError",
    "WeightsError",
    "kind_of",
    "nearest",
    "wrong_model",
]


class OpenworkError(Exception):
    """Base of all errors that openwork raises on purpose."""


class ConfigError(OpenworkError, ValueError):
    """A configuration file or option is wrong."""


class RecordError(OpenworkError, ValueError):
    """A record or plan file is wrong or does not fit the model."""


class WeightsError(OpenworkError, ValueError):
    """A weights file cannot be loaded into the model."""


class ConversionError(OpenworkError, ValueError):
    """A model file cannot be converted."""


class FileError(OpenworkError, OSError, ValueError):
    """A path cannot be read or written."""


class ModelError(OpenworkError, RuntimeError):
    """The model fails when it is run."""


class NothingToPruneError(OpenworkError, RuntimeError):
    """The model has no channel that may be removed under the given settings."""


class UnsupportedModelError(OpenworkError, TypeError):
    """The object given as a model is of a kind that cannot be changed."""


def nearest(name: str, allowed: Iterable[str], count: int = 3) -> str:
    """Words for the end of a message: the allowed names closest to `name`, else the first few.

    Close are names below `name` where that is a scope, names spelled alike, and names in the same scope, in this order.
    """
    names = sorted(set(allowed))
    close = [known for known in names if known.startswith((f"{name}/", f"{name}."))][:count]
    close = close or difflib.get_close_matches(name, names, n=count, cutoff=0.6)
    scope = name.rpartition("/")[0]
    close = close or [known for known in names if scope and known.startswith(f"{scope}/")][:count]
    if close:
        return "did you mean " + " or ".join(repr(candidate) for candidate in close) + "?"
    shown = ", ".join(repr(candidate) for candidate in names[:count])
    return f"allowed: {shown}{', ...' if len(names) > count else ''}"


def kind_of(value: Any) -> str:
    """What a value is, with its article: ``a str``, or ``the class Net`` where a class was given for its instance."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def wrong_model(name: str, value: Any, needed: str) -> UnsupportedModelError:
    """The error for an argument that is no model, or the class of one.

    Args:
        name: the argument.
        value: what was given.
        needed: what is needed, with its article.
    """
    instance = f", an instance: {value.__name__}(...)" if isinstance(value, type) else ""
    return UnsupportedModelError(f"{name} is {kind_of(value)}; {needed} is needed{instance}")
