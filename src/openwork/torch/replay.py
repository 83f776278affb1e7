"""Run a cut model on shapes and compare every operator with what the labels predict.

The replay hands the model results of the *predicted* shapes, so one pass finds all places where Python code
states or computes a length that no longer holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from openwork.errors import ModelError
from openwork.torch.prediction import Prediction, Source
from openwork.torch.structure import Inputs, all_modules
from openwork.torch.trace import ModuleStack, Record, Slot
from openwork.torch.watch import Call, Watcher, tensors_in

__all__ = ["Mismatch", "Pair", "Source", "replay"]

# Operators that may come and go with memory layout or device: not used for alignment.
_LOOSE = {
    "aten.clone.default",
    "aten._to_copy.default",
    "aten.contiguous.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.scalar_tensor.default",
    "aten.as_strided_.default",
}
# One operator under several names: which is used depends on memory layout.
_SAME = {"aten._unsafe_view.default": "aten.view.default", "aten._reshape_alias.default": "aten.view.default"}


_SLICE = "aten.slice.Tensor"


def _takes_all(record: Record) -> bool:
    """A slice of everything: some releases of torch run none, depending on how the bounds are written."""
    return record.name == _SLICE and record.inputs[0].shape == record.outputs[0].shape


@dataclass(frozen=True)
class Pair:
    """One length: in the original run, as predicted, and as the cut model's code gave it.

    `index` is its place among the operator's size arguments, -1 if it is none of them. `source` is where the
    predicted length is read off.
    """

    was: int
    expected: int
    given: int
    index: int = -1
    source: Source | None = None

    @property
    def stale(self) -> bool:
        """The code still says the old length."""
        return self.given == self.was != self.expected


@dataclass(frozen=True, eq=False)
class Mismatch:
    """A place where the cut model's code contradicts the prediction.

    Attributes:
        index: the record.
        stack: modules being executed, outermost first.
        pairs: the lengths that differ.
        what: words for the reason.
        given: all size arguments as the cut model's code gave them.
        check: the model's code raised an error here.
    """

    index: int
    stack: tuple[str, ...]
    pairs: tuple[Pair, ...]
    what: str
    given: tuple[int, ...] = ()
    check: bool = False

    @property
    def stale(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.pairs if pair.stale)


class _Diverged(Exception):
    """The cut model runs other operators."""


class _Replay(Watcher):
    def __init__(self, prediction: Prediction, guided: bool) -> None:
        super().__init__(meta=prediction.trace.mode == "meta", results=prediction.trace.results)
        self.trace = prediction.trace
        self.prediction = prediction
        self.guided = guided
        self.position = 0
        self.last = -1
        self.mismatches: list[Mismatch] = []
        self.modules: ModuleStack | None = None

    def _align(self, call: Call) -> int | None:
        """The record of a call; None for layout changes, and for calls that give no tensor (they have none)."""
        records = self.trace.records
        for place in range(self.position, len(records)):
            name = records[place].name
            if _SAME.get(name, name) == _SAME.get(call.name, call.name):
                return place
            if records[place].name not in _LOOSE and not _takes_all(records[place]):
                break
        return None

    def on_call(self, call: Call, run: Callable[[], Any]) -> Any:
        place = self._align(call)
        if place is None:
            result = self.compute(call, run)
            made = next(tensors_in(result), None)
            whole = call.name == _SLICE and made is not None and made.shape == call.tensors[0].shape
            if call.name not in _LOOSE and not whole and made is not None:
                raise _Diverged
            return result
        record = self.trace.records[place]
        self.position, self.last = place + 1, place
        _, outputs, sizes = self.prediction.of(place)
        self._compare(call, record, place, sizes)
        given = call.tensors
        if self.guided and record.pointwise:
            like = next((t for t in given if tuple(t.shape) == outputs[0] and _symbolic(t)), None)
            if like is not None:
                with self.pause():
                    return torch.empty_like(like, dtype=record.dtypes[0])
        try:
            result = self.compute(call, run)
        except Exception:
            # A stated length that no longer holds: noted above, go on with what should come out.
            if not self.guided:
                raise
            device = next((tensor.device for tensor in given), torch.device("meta"))
            return self._fill(record.structure, record, outputs, given, device)
        shapes = [tuple(tensor.shape) for tensor in tensors_in(result)]
        if shapes[:1] == outputs[:1] or all(0 in shape for shape in (*shapes, *outputs)):
            return result  # results without elements have no labels
        if not self.guided:
            self._add(place, _pairs(record, place, outputs, shapes), "another shape")
            return result
        if not self.mismatches or self.mismatches[-1].index != place:
            self._add(place, _pairs(record, place, outputs, shapes), "another shape")
        device = next((tensor.device for tensor in tensors_in(result)), torch.device("meta"))
        return self._fill(record.structure, record, outputs, given, device)

    def _fill(
        self,
        structure: Any,
        record: Record,
        shapes: list[tuple[int, ...]],
        given: list[torch.Tensor],
        device: torch.device,
    ) -> Any:
        if isinstance(structure, Slot):
            if structure.alias is not None and structure.alias < len(given):
                return given[structure.alias]
            with self.pause():
                return torch.empty(shapes[structure.index], dtype=record.dtypes[structure.index], device=device)
        if isinstance(structure, (list, tuple)):
            return type(structure)(self._fill(item, record, shapes, given, device) for item in structure)
        return structure

    def _compare(self, call: Call, record: Record, place: int, expected: list[int] | None) -> None:
        rule = record.rule
        sized = expected is not None
        if expected is not None and rule is not None and rule.sizes is not None:
            actual = [tuple(tensor.shape) for tensor in call.tensors]
            given = rule.sizes(call, actual)
            if given != expected:
                was = record.sizes or []
                if len(given) == len(expected) == len(was):
                    triples = enumerate(zip(was, expected, given, strict=True))
                    pairs = tuple(Pair(w, e, g, i, Source(place, "sizes", 0, i)) for i, (w, e, g) in triples if e != g)
                else:
                    pairs = ()
                self._add(place, pairs, "a size", tuple(given))
        for name, value in call.numbers.items():
            old = record.call_numbers.get(name)
            floating = isinstance(value, float) or isinstance(old, float)
            if (floating or not sized) and value != old and name not in ("storage_offset",):
                self._add(place, (), f"the number {old!r}, computed from a channel count,")

    def _add(self, place: int, pairs: tuple[Pair, ...], what: str, given: tuple[int, ...] = ()) -> None:
        record = self.trace.records[place]
        stack = tuple(self.modules.paths) if self.modules else record.stack
        self.mismatches.append(Mismatch(place, stack, pairs, what, given))


def _symbolic(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    return tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor"


def _pairs(
    record: Record, place: int, expected: list[tuple[int, ...]], given: list[tuple[int, ...]]
) -> tuple[Pair, ...]:
    pairs = []
    # First results only: statistics and indices beside them are not labelled.
    for labels, want, got in zip(record.outputs[:1], expected, given, strict=False):
        if len(want) == len(got):
            triples = enumerate(zip(labels.shape, want, got, strict=True))
            pairs += [Pair(w, e, g, source=Source(place, "outputs", 0, axis)) for axis, (w, e, g) in triples if e != g]
    return tuple(pairs)


def replay(twin: nn.Module, inputs: Inputs, prediction: Prediction, guided: bool = True) -> list[Mismatch]:
    """Run the cut model on shapes; returns all contradictions found (the last is where it stopped, if it did).

    Args:
        twin: the cut model, on the device that the trace ran on.
        inputs: inputs on that device.
        prediction: what the operators should have.
        guided: hand out results of predicted shapes; else really run the operators on shapes.
    """
    trace = prediction.trace
    watcher = _Replay(prediction, guided and trace.mode != "real")
    state = _attributes(twin)
    modules = ModuleStack(twin, watcher)
    watcher.modules = modules
    try:
        with watcher:
            twin(*inputs.args, **inputs.kwargs)
    except _Diverged:
        watcher._add(watcher.last + 1 if watcher.last + 1 < len(trace.records) else watcher.last,
                     _sizes_seen(watcher), "the path taken")  # fmt: skip
    except (ModelError, KeyboardInterrupt):
        raise
    except Exception as error:
        stack = modules.deepest
        text = " ".join(str(error).split())[:160]
        watcher.mismatches.append(
            Mismatch(
                max(watcher.last, 0),
                stack,
                _sizes_seen(watcher, stack[-1] if stack else None),
                f"a check ({type(error).__name__}: {text})",
                check=True,
            )
        )
    finally:
        modules.remove()
        _restore(state)
    return watcher.mismatches


def _sizes_seen(watcher: _Replay, module: str | None = None) -> tuple[Pair, ...]:
    """Lengths that changed around the place where the model stopped: what a failed check may have compared.

    With `module` also all that change anywhere in that module.
    """
    pairs: dict[tuple[int, int], Pair] = {}
    records = watcher.trace.records
    near = range(max(0, watcher.last - 3), min(len(records), watcher.last + 2))
    inside = [place for place, record in enumerate(records) if module and record.module == module]
    for place in (*near, *inside):
        for side in ("outputs", "inputs"):
            for number, labels in enumerate(getattr(records[place], side)):
                shapes = zip(labels.shape, watcher.prediction.shape(labels), strict=True)
                for axis, (was, now) in enumerate(shapes):
                    if was != now:
                        pairs[was, now] = Pair(was, now, was, source=Source(place, side, number, axis))
    return tuple(pairs.values())


# The tables of every module that a forward does not change.
_HOOKS = {name for name in vars(nn.Module()) if name not in ("_parameters", "_buffers", "_modules")}


def _attributes(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]:
    """Attributes of all modules: some models keep results in caches, which must not reach the next pass.

    Layers of torch itself keep none.
    """
    state = []
    for module in all_modules(model).values():
        if type(module).__module__.startswith("torch.nn.modules."):
            continue
        values = dict(vars(module))
        containers = {
            name: copy.copy(value)
            for name, value in values.items()
            if isinstance(value, (dict, list)) and name not in _HOOKS
        }
        state.append((module, values, containers))
    return state


def _restore(state: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
    for module, values, containers in state:
        own = vars(module)
        own.clear()
        own.update(values)
        for name, saved in containers.items():
            value = own[name]
            if isinstance(value, dict):
                value.clear()
                value.update(saved)
            else:
                value[:] = saved
