"""Sizes that notice which of their lengths are read.

``x.shape[-2:]`` tells nothing about channels, ``b, c, h, w = x.shape`` does. A model that reads no length of channels
cannot compute with one, so it need not be run again after a cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["WatchedSize", "plain"]


class WatchedSize(tuple[int, ...]):
    """A torch.Size for Python code; ``noted(axis)`` is called for each length that is read, ``noted(None)`` for all."""

    _noted: Callable[[int | None], None]

    def __new__(cls, sizes: torch.Size, noted: Callable[[int | None], None]) -> WatchedSize:
        made = super().__new__(cls, sizes)
        made._noted = noted
        return made

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return torch.Size

    def read(self) -> torch.Size:
        """All lengths, which counts as a read."""
        self._noted(None)
        return torch.Size(tuple.__iter__(self))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            for axis in range(*key.indices(len(self))):
                self._noted(axis)
            return torch.Size(tuple.__getitem__(self, key))
        value = tuple.__getitem__(self, key)
        self._noted(key.__index__() % len(self))
        return value

    def numel(self) -> int:
        return self.read().numel()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        import numpy as np

        return np.asarray(tuple(self.read()), *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.Size, (tuple(self.read()),)

    def __hash__(self) -> int:
        return hash(self.read())


def _reading(name: str) -> Callable[..., Any]:
    def method(self: WatchedSize, *args: Any) -> Any:
        return getattr(self.read(), name)(*(plain(arg) for arg in args))

    return method


for _name in ("__iter__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__mul__", "__rmul__",
              "__contains__", "__repr__", "__str__", "__format__", "index", "count"):  # fmt: skip
    setattr(WatchedSize, _name, _reading(_name))
WatchedSize.__radd__ = lambda self, other: other + self.read()  # type: ignore[attr-defined]


def plain(value: Any) -> Any:
    """A value for torch's own code, which reads sizes past Python."""
    if type(value) is WatchedSize:
        return value.read()
    if type(value) in (list, tuple):
        return type(value)([plain(item) for item in value])
    return value
