"""What mended a stated length once mends it again: in the next trial, and in other modules of the same class."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from openwork.torch.prediction import Prediction
from openwork.torch.replay import Pair, Source
from openwork.torch.trace import Trace

__all__ = ["Memory", "Option"]


@dataclass(frozen=True)
class Option:
    """One attribute (or one element of it) that may hold the old length."""

    module: str
    attribute: str
    path: tuple[int, ...]


@dataclass(eq=False)
class Memory:
    """Attributes that mended a length, by module, old length and where the new one is read off.

    Args:
        trace: the labelled original run.
    """

    trace: Trace
    _mended: dict[tuple[str, int, Source | None], tuple[Option, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._mended)

    def add(self, module: str, pair: Pair, options: tuple[Option, ...]) -> None:
        self._mended[module, pair.was, pair.source] = options

    def of(self, module: str, pair: Pair) -> tuple[Option, ...] | None:
        """What mended this length in this module before, at the same place rather than at another."""
        exact = self._mended.get((module, pair.was, pair.source))
        if exact is not None:
            return exact
        alike = (found for (path, was, _), found in self._mended.items() if (path, was) == (module, pair.was))
        return next(alike, None)

    def under(self, prediction: Prediction) -> list[tuple[str, Pair, tuple[Option, ...]]]:
        """All that will have to be mended again, with the new lengths: (module, lengths, attributes)."""
        found = []
        for (module, was, source), options in self._mended.items():
            new = was if source is None else prediction.length(source)
            if new != was:
                found.append((module, Pair(was, new, was, source=source), options))
        return found

    def elsewhere(
        self, model: nn.Module, module: str, prediction: Prediction
    ) -> list[tuple[str, Pair, tuple[Option, ...]]]:
        """What mended modules of the class of `module`, carried over to all others of the class."""
        kind = type(model.get_submodule(module))
        first = self._first
        alike = [path for path in first if path and type(model.get_submodule(path)) is kind]
        known: dict[tuple[int, Source], tuple[str, tuple[Option, ...]]] = {}
        for (path, was, source), options in self._mended.items():
            if source is not None and path in alike:
                offset = source.moved(-first[path])
                known.setdefault((was, offset), (path, options))
        found = []
        for path in alike:
            if any(done == path for done, _, _ in self._mended):
                continue
            for (was, offset), (from_path, options) in known.items():
                source = offset.moved(first[path])
                if not prediction.has(source, was) or self._name(source) != self._name(offset.moved(first[from_path])):
                    continue
                moved = tuple(self._moved(option, from_path, path) for option in options)
                new = prediction.length(source)
                there = all(
                    option is not None and option.attribute in vars(model.get_submodule(option.module))
                    for option in moved
                )
                if new != was and there:
                    found.append((path, Pair(was, new, was, source=source), moved))
        return found  # type: ignore[return-value]

    def _name(self, source: Source) -> str:
        return self.trace.records[source.place].name

    def _moved(self, option: Option, old: str, new: str) -> Option | None:
        """The same attribute as seen from another module: its own, or that of a module around or inside it."""
        if option.module == old or option.module.startswith(old + "."):
            return Option(new + option.module[len(old) :], option.attribute, option.path)
        before, after = (self.trace.records[self._first[path]].stack for path in (old, new))
        if option.module in before:
            depth = len(before) - before.index(option.module)
            if depth <= len(after):
                return Option(after[-depth], option.attribute, option.path)
        return None

    @cached_property
    def _first(self) -> dict[str, int]:
        """The first record that runs directly in each module."""
        first: dict[str, int] = {}
        for place, record in enumerate(self.trace.records):
            first.setdefault(record.module, place)
        return first
