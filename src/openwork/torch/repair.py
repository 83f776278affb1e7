"""Find the attributes that state sizes, and set them: predict, compare, repair.

At a place where the cut model's code states an old length, the modules being executed are searched, innermost
first, for an int, list or tuple attribute that holds it. A candidate counts only if the contradiction is gone
in the next pass. What no attribute mends is a constant in the source: its labels are frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn

from openwork.graph.groups import IntArray
from openwork.graph.plan import Repair
from openwork.torch.prediction import Prediction
from openwork.torch.recall import Memory, Option
from openwork.torch.replay import Mismatch, Pair, replay
from openwork.torch.structure import Inputs
from openwork.torch.surgery import like
from openwork.torch.ties import find_tie
from openwork.torch.trace import Trace

__all__ = ["Unrepairable", "repair"]

# Attributes of layers that are lengths of something else than channels.
_NEVER = {"kernel_size", "stride", "padding", "dilation", "output_padding", "training", "num_embeddings",
          "_reversed_padding_repeated_twice", "output_size", "scale_factor", "padding_idx"}  # fmt: skip
_LIKELY = ("head", "dim", "chan", "feature", "embed", "width", "hidden", "group", "inner", "planes", "normalized")
_PASSES = 40


class Unrepairable(Exception):
    """What no attribute mends: labels to be frozen, and rows of labels that must lose the same number."""

    def __init__(self, frozen: list[tuple[IntArray, str]], ties: list[tuple[IntArray, str]], module: str) -> None:
        super().__init__(frozen, ties, module)
        self.module = module
        self.frozen = frozen
        self.ties = ties


def _places(value: Any, old: int, depth: int = 0) -> Iterator[tuple[int, ...]]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        if value == old:
            yield ()
    elif isinstance(value, (list, tuple)) and len(value) <= 64 and depth < 3:
        for i, item in enumerate(value):
            for rest in _places(item, old, depth + 1):
                yield (i, *rest)


def _options(search: _Search, mismatch: Mismatch, pair: Pair) -> list[tuple[Option, ...]]:
    """Sets of attributes to try, most likely first: each alone, then all of a module together."""
    tries: list[tuple[Option, ...]] = []
    for path in reversed(mismatch.stack):
        values = search.attributes(path)
        found = [
            Option(path, name, place)
            for name, value in values.items()
            if name not in _NEVER and not name.startswith("__")
            for place in _places(value, pair.was)
        ]
        # Stable: the same place in a list as in the operator's, then names that speak of channels.
        part = search.part(pair)
        found.sort(
            key=lambda option: (
                part >= 0 and option.path[-1:] != (part,),
                not any(word in option.attribute.lower() for word in _LIKELY),
            )
        )
        tries += [(option,) for option in found]
        if len(found) > 1:
            tries.append(tuple(found))
        if mismatch.check and found:
            # A module that checks itself may need a count beside the length: 12 heads of 64 make 768.
            tries += [(*found, option) for option in _counts(path, values, pair)]
    return tries


def _counts(path: str, values: dict[str, Any], pair: Pair) -> list[Option]:
    """Attributes that are a divisor of the old length and shrink in proportion."""
    return [
        Option(path, name, ())
        for name, value in values.items()
        if type(value) is int
        and 1 < value < pair.was
        and pair.was % value == 0
        and value * pair.expected % pair.was == 0
        and name not in _NEVER
        and any(word in name.lower() for word in _LIKELY)
    ]


@dataclass
class _Try:
    """The state of mending one stated length in one module."""

    options: list[tuple[Option, ...]]
    pair: Pair
    at: int = 0
    recalled: bool = False


_Key = tuple[str, int, int, int]


@dataclass
class _Search:
    model: nn.Module
    memory: Memory
    original: dict[tuple[str, str], Any] = field(default_factory=dict)
    tries: dict[_Key, _Try] = field(default_factory=dict)

    def key(self, module: str, pair: Pair) -> _Key:
        """What is mended as one: a length in a module; of the parts of a split each by itself."""
        return module, pair.was, pair.expected, self.part(pair)

    def part(self, pair: Pair) -> int:
        """The part of a split that a length belongs to, -1 for all else."""
        source = pair.source
        if source is None or source.side != "sizes" or "split" not in self.memory.trace.records[source.place].name:
            return -1
        return source.index

    def apply(self) -> None:
        """Set the model's attributes to what the current tries say."""
        wanted: dict[tuple[str, str], dict[tuple[int, ...], Pair]] = {}
        for attempt in self.tries.values():
            if attempt.at < len(attempt.options):
                for option in attempt.options[attempt.at]:
                    wanted.setdefault((option.module, option.attribute), {})[option.path] = attempt.pair
        for key in wanted:
            if key not in self.original:
                self.original[key] = vars(self.model.get_submodule(key[0]))[key[1]]
        for key, old in self.original.items():
            value = old
            for place, pair in wanted.get(key, {}).items():
                value = _replaced(value, place, pair)
            setattr(self.model.get_submodule(key[0]), key[1], value)

    def attributes(self, module: str) -> dict[str, Any]:
        """A module's attributes as they were before anything was tried."""
        values = vars(self.model.get_submodule(module))
        tried = {name: old for (path, name), old in self.original.items() if path == module}
        return {**values, **tried} if tried else values

    def remember(self, failing: Collection[str] = ()) -> None:
        """Keep what mended, but for modules that still fail."""
        for (module, *_), attempt in self.tries.items():
            if attempt.at < len(attempt.options) and module not in failing:
                self.memory.add(module, attempt.pair, attempt.options[attempt.at])

    def recall(self, known: list[tuple[str, Pair, tuple[Option, ...]]]) -> bool:
        """Try at once what mended these lengths before. False if there is nothing new in it."""
        before = set(self.tries)
        for module, pair, options in known:
            key = self.key(module, pair)
            if key not in self.tries:
                self.tries[key] = _Try([options], pair, 0, recalled=True)
            elif key not in before:
                # The same length at several places of the module.
                joined = dict.fromkeys((*self.tries[key].options[0], *options))
                self.tries[key].options[0] = tuple(joined)
        return len(self.tries) > len(before)

    def repairs(self) -> list[Repair]:
        result = []
        for (module, attribute), old in self.original.items():
            new = vars(self.model.get_submodule(module))[attribute]
            if new != old:
                result.append(Repair(module, attribute, _listed(old), _listed(new)))
        return result


def _replaced(value: Any, place: tuple[int, ...], pair: Pair) -> Any:
    if not place:
        return pair.expected if value == pair.was else value * pair.expected // pair.was
    items = list(value)
    items[place[0]] = _replaced(items[place[0]], place[1:], pair)
    return like(value, items)


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def repair(model: nn.Module, inputs: Inputs, prediction: Prediction, memory: Memory) -> list[Repair]:
    """Set attributes of a cut model until it runs as predicted.

    Args:
        model: the cut model on shapes; its attributes are changed.
        inputs: inputs on shapes.
        prediction: what the operators should have.
        memory: attributes that mended a length before; set at once, and extended.

    Returns:
        The attributes that were set, relative to what `model` had.

    Raises:
        Unrepairable: what has to be frozen.
    """
    search = _Search(model, memory)
    trace, dead = prediction.trace, prediction.dead
    if search.recall(memory.under(prediction)):
        search.apply()
        if not replay(model, inputs, prediction, guided=False):
            return search.repairs()
    for _ in range(_PASSES):
        mismatches = replay(model, inputs, prediction)
        if not mismatches:
            break
        if not _advance(search, model, prediction, mismatches):
            # Judge what is left when only attributes that mended something are set.
            search.apply()
            left = replay(model, inputs, prediction) or mismatches
            search.remember({mismatch.stack[-1] if mismatch.stack else "" for mismatch in left})
            raise _verdict(model, trace, left, dead)
        search.apply()
    else:
        raise _verdict(model, trace, mismatches, dead)
    if not search.tries:
        return []  # nothing had to be mended, so this pass was a real one
    search.remember()
    left = replay(model, inputs, prediction, guided=False)
    if left:
        raise _verdict(model, trace, left[:1], dead)
    return search.repairs()


def _advance(search: _Search, model: nn.Module, prediction: Prediction, mismatches: list[Mismatch]) -> bool:
    """Move each stated length that still fails to its next option. False if nothing is left to try."""
    moved = False
    failing: set[_Key] = set()
    modules = {mismatch.stack[-1] if mismatch.stack else "" for mismatch in mismatches}
    before = set(search.tries)
    for mismatch in mismatches:
        module = mismatch.stack[-1] if mismatch.stack else ""
        if mismatch.check and module:
            # A check hides what comes after it: what let earlier modules of the class pass is set in all of them.
            search.remember(modules)
            moved = search.recall(search.memory.elsewhere(model, module, prediction)) or moved
        for pair in mismatch.stale:
            key = search.key(module, pair)
            if key in failing:
                continue
            failing.add(key)
            attempt = search.tries.get(key)
            if attempt is not None and key not in before:
                continue  # recalled just now
            if attempt is None:
                known = search.memory.of(module, pair)
                attempt = _Try([] if known is None else [known], pair, -1, recalled=True)
                search.tries[key] = attempt
            if attempt.recalled and attempt.at + 1 >= len(attempt.options):
                attempt.recalled = False
                attempt.options += [o for o in _options(search, mismatch, pair) if o not in attempt.options]
            if attempt.at < len(attempt.options):
                attempt.at += 1
                moved = moved or attempt.at < len(attempt.options)
    if moved:
        return True
    # A length that was right became wrong: blame an attribute that was set to just this value.
    for mismatch in mismatches:
        for pair in mismatch.pairs:
            if pair.stale:
                continue
            for attempt in search.tries.values():
                if attempt.at >= len(attempt.options) or attempt.pair.expected != pair.given:
                    continue
                if any(option.module in mismatch.stack for option in attempt.options[attempt.at]):
                    attempt.at += 1
                    moved = True
                    break
    return moved


def _verdict(model: nn.Module, trace: Trace, mismatches: list[Mismatch], dead: np.ndarray) -> Unrepairable:
    """Tie where one length is computed from another, else freeze; the first contradiction in each module only."""
    frozen, ties = [], []
    judged: set[str] = set()
    for mismatch in mismatches:
        module = mismatch.stack[-1] if mismatch.stack else ""
        if module in judged:
            continue
        judged.add(module)
        tie = find_tie(trace, mismatch, dead)
        if tie is not None:
            ties.append(tie)
            if mismatch.check:
                ties += _siblings(model, trace, mismatch, dead)
        else:
            frozen.append(_freeze(trace, mismatch, dead))
    return Unrepairable(frozen, ties, mismatches[0].stack[-1] if mismatches[0].stack else "")


def _siblings(model: nn.Module, trace: Trace, mismatch: Mismatch, dead: np.ndarray) -> list[tuple[IntArray, str]]:
    """The same tie in all modules of the class: a failing check hides what comes after it."""
    module = mismatch.stack[-1] if mismatch.stack else ""
    kind = type(model.get_submodule(module))
    paths = dict.fromkeys(record.module for record in trace.records if record.module != module)
    alike = [path for path in paths if type(model.get_submodule(path)) is kind]
    found = (find_tie(trace, replace(mismatch, stack=(path,)), dead) for path in alike)
    return [tie for tie in found if tie is not None]


def _freeze(trace: Trace, mismatch: Mismatch, dead: np.ndarray) -> tuple[IntArray, str]:
    record = trace.records[mismatch.index]
    labels: list[IntArray] = []
    changed = {(pair.was, pair.expected) for pair in mismatch.pairs if pair.was != pair.expected}
    for tensor in (*record.outputs, *record.inputs):
        for entry in tensor.entries:
            if dead[entry.labels].any() and (not changed or not labels):
                labels.append(entry.labels.ravel())
    seen: set[int] = set()
    queue = list(record.producers)
    while not labels and queue:
        index = queue.pop()
        if index in seen:
            continue
        seen.add(index)
        earlier = trace.records[index]
        found = [
            entry.labels.ravel() for tensor in earlier.inputs for entry in tensor.entries if dead[entry.labels].any()
        ]
        if found:
            labels = found
        else:
            queue.extend(earlier.producers)
    if not labels:
        # Nothing near the place changes: whatever died before it is to blame.
        labels = [
            entry.labels.ravel()
            for earlier in trace.records[: mismatch.index + 1][::-1][:50]
            for tensor in earlier.outputs
            for entry in tensor.entries
            if dead[entry.labels].any()
        ]
    place = mismatch.stack[-1] if mismatch.stack and mismatch.stack[-1] else "the model itself"
    sizes = ", ".join(f"{pair.was}" for pair in mismatch.pairs if pair.given != pair.expected)
    what = mismatch.what if mismatch.check else f"{mismatch.what} {sizes}".strip()
    return (
        np.concatenate(labels) if labels else np.zeros(0, dtype=np.int64),
        f"{what} is written in the forward of {place} ({record.name})",
    )
