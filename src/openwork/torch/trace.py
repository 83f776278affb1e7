"""Run a model once, on shapes if possible, and label every tensor.

The user's model is never touched: its structure is copied with meta tensors in place of the weights. Tried in
this order: meta tensors (shapes only, no memory), fake tensors (shapes, but devices are kept), a real copy
(for models whose Python code looks at values).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from openwork.errors import ModelError
from openwork.graph.labels import Entry, LabelMap, LabelStore
from openwork.graph.operators import pointwise
from openwork.torch.layers import states_sizes
from openwork.torch.rules import Context, Cost, Rule, find_rule
from openwork.torch.shape_results import ShapeResults
from openwork.torch.size_reads import WatchedSize
from openwork.torch.structure import Inputs, all_modules, all_tensors, copy_structure, one_line, shape_only
from openwork.torch.watch import Call, Watcher, outputs_in, tensors_in

__all__ = ["ModuleStack", "Record", "Slot", "Trace", "on_shapes", "trace"]


@dataclass(eq=False)
class Record:
    """One operator call of the traced forward.

    Attributes:
        name: operator.
        stack: paths of the modules being executed, outermost first.
        inputs, outputs: label maps of its tensors.
        call_numbers: its arguments that are numbers.
        rule: the rule that was used, if any.
        sizes: its size arguments as given, if the rule knows of any.
        cost: factors of its multiply-accumulates.
        producers: indices of the records that made its inputs.
        structure: its result with `Slot` in place of tensors.
        dtypes: of its results.
        certain: it runs in a layer of torch itself whose sizes follow from its parameters.
        pointwise: an elementwise operator with a fresh result.
    """

    name: str
    stack: tuple[str, ...]
    inputs: list[LabelMap]
    outputs: list[LabelMap]
    call_numbers: dict[str, Any]
    rule: Rule | None
    sizes: list[int] | None
    cost: Cost | None
    producers: list[int] = field(default_factory=list)
    structure: Any = None
    dtypes: list[torch.dtype] = field(default_factory=list)
    certain: bool = False
    pointwise: bool = False

    @property
    def module(self) -> str:
        return self.stack[-1] if self.stack else ""

    @property
    def where(self) -> str:
        return f"{self.name} in {self.module or 'the model itself'}"


@dataclass(eq=False)
class Trace:
    """A labelled forward pass."""

    store: LabelStore
    records: list[Record]
    lengths_read: list[Entry]
    parameters: dict[str, LabelMap]
    mode: str
    results: ShapeResults | None = None


class ModuleStack:
    """Which modules of a copy are being executed. Recurrent layers are run without being watched.

    The copy's modules get a forward of their own until `remove`: two hooks a module would cost several times more.
    """

    def __init__(self, model: nn.Module, watcher: Watcher) -> None:
        self.paths: list[str] = []
        self.deepest: tuple[str, ...] = ()
        self._own: list[tuple[dict[str, Any], Any]] = []
        for name, module in all_modules(model).items():
            values = module.__dict__
            self._own.append((values, values.get("forward")))
            values["forward"] = self._followed(name, module, watcher)

    def _followed(self, name: str, module: nn.Module, watcher: Watcher) -> Callable[..., Any]:
        forward, paths = module.forward, self.paths

        def follow(*args: Any, **kwargs: Any) -> Any:
            paths.append(name)
            self.deepest = tuple(paths)
            try:
                return forward(*args, **kwargs)
            finally:
                paths.pop()

        def follow_opaque(*args: Any, **kwargs: Any) -> Any:
            paths.append(name)
            self.deepest = tuple(paths)
            if not watcher.paused:
                watcher.on_opaque(module, name, args, kwargs)
            watcher.paused += 1
            try:
                return forward(*args, **kwargs)
            finally:
                watcher.paused -= 1
                paths.pop()

        chosen = follow_opaque if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) else follow
        chosen.__wrapped__ = forward  # type: ignore[attr-defined]  # for code that asks for its signature
        return chosen

    def remove(self) -> None:
        for values, own in self._own:
            if own is None:
                values.pop("forward", None)
            else:
                values["forward"] = own


@dataclass(frozen=True)
class Slot:
    """Place of a tensor in a result; `alias` is the place among the call's tensors if it is one of them."""

    index: int
    alias: int | None


def _structure(value: Any, given: list[torch.Tensor], counter: list[int]) -> Any:
    if isinstance(value, torch.Tensor):
        counter[0] += 1
        alias = next((i for i, tensor in enumerate(given) if tensor is value), None)
        return Slot(counter[0] - 1, alias)
    if isinstance(value, (list, tuple)):
        return type(value)(_structure(item, given, counter) for item in value)
    return value


# Operators whose result is a Python value.
_VALUES = {"aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default", "aten.item.default"}


class _Stated(int):
    """The groups of a convolution with a forward of its own: arrives at the operator if the code reads the attribute,
    which `certain_repairs` sets."""


class Tracer(Watcher):
    """Labels every tensor of a forward pass."""

    def __init__(self, model: nn.Module, meta: bool) -> None:
        super().__init__(meta)
        self.store = LabelStore()
        self.records: list[Record] = []
        self.lengths_read: dict[int, Entry] = {}
        self.values_read = False
        self.parameters: dict[str, LabelMap] = {}
        self.modules: ModuleStack | None = None
        modules = all_modules(model)
        self._names = {id(tensor): name for name, tensor in all_tensors(model, modules=modules).items()}
        self._certain = {name for name, module in modules.items() if states_sizes(module)}
        for name, module in modules.items():
            if isinstance(module, nn.modules.conv._ConvNd) and name not in self._certain:
                module.groups = _Stated(module.groups)
        self._maps: dict[int, tuple[LabelMap, int]] = {}
        self._refs: dict[int, Any] = {}

    # What rules ask for.
    def map_of(self, tensor: torch.Tensor) -> LabelMap:
        known = self._maps.get(id(tensor))
        if known is not None:
            return known[0]
        name = self._names.get(id(tensor))
        if name is None:
            # A constant that the model holds or makes.
            return LabelMap(tuple(tensor.shape), weight=True)
        if name not in self.parameters:
            self.parameters[name] = self.store.parameter(name, tensor.shape)
        return self.parameters[name]

    def parameter_of(self, tensor: torch.Tensor) -> str | None:
        return self._names.get(id(tensor))

    def _remember(self, tensor: torch.Tensor, labels: LabelMap, index: int) -> None:
        key = id(tensor)
        if key in self._names:
            return
        self._maps[key] = (labels, index)
        if key not in self._refs:
            self._refs[key] = weakref.ref(tensor, lambda _, key=key: self._forget(key))  # type: ignore[misc]

    def _forget(self, key: int) -> None:
        self._maps.pop(key, None)
        self._refs.pop(key, None)

    def on_moved(self, old: torch.Tensor, new: torch.Tensor) -> None:
        known = self._maps.get(id(old))
        if known is not None:
            self._remember(new, *known)

    def on_size_read(self, tensor: torch.Tensor, axis: int | None, value: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return value
        labels = self.map_of(tensor)
        if not labels.entries:
            return value
        if axis is None and isinstance(value, torch.Size):
            self.sizes_handed_out = True
            return WatchedSize(value, functools.partial(self._noted, labels))
        self._noted(labels, axis)
        return value

    def _noted(self, labels: LabelMap, axis: int | None) -> None:
        entries = labels.entries if axis is None else (labels.entry(axis % max(1, len(labels.shape))),)
        for entry in entries:
            if entry is not None:
                self.lengths_read[id(entry)] = entry

    def on_value_read(self, tensors: list[torch.Tensor]) -> None:
        """Hold the channels that the value was computed from: what Python does with it is not seen.

        A value reduced from channels that other layers read as well (a mean, a check for NaN) is a statistic of
        what stays, as in a norm; where nothing else reads them, the channels are there for the value's sake.
        """
        self.values_read = True
        path = self.modules.paths[-1] if self.modules and self.modules.paths else ""
        self.store.location = path or "the model itself"
        why = "its values are read by Python code"
        queue = []
        for tensor in tensors:
            labels = self.map_of(tensor)
            self.store.freeze_map(labels, why)
            if not labels.entries and id(tensor) in self._maps:
                queue.append(self._maps[id(tensor)][1])
        seen: set[int] = set()
        while queue:
            index = queue.pop()
            if index < 0 or index in seen:
                continue
            seen.add(index)
            record = self.records[index]
            if any(m.entries and not m.weight for m in record.inputs):
                for labels in record.inputs:
                    if not labels.weight:
                        self.store.judge(labels, why)
            else:
                queue += record.producers

    def on_opaque(self, module: nn.Module, name: str, args: Any, kwargs: Any) -> None:
        self.store.location = f"{type(module).__name__} {name}"
        for tensor in (*tensors_in((args, kwargs)), *module.parameters()):
            self.store.freeze_map(self.map_of(tensor), "recurrent layers are not pruned yet")

    def on_call(self, call: Call, run: Callable[[], Any]) -> Any:
        result = self.compute(call, run)
        tensors = list(tensors_in(result))
        if not tensors:
            if call.name in _VALUES:
                self.on_value_read(call.tensors)
            return result
        store, stack = self.store, tuple(self.modules.paths) if self.modules else ()
        where = f"{call.name} in {stack[-1] if stack and stack[-1] else 'the model itself'}"
        store.location = where
        context = Context(store, call, [tuple(tensor.shape) for tensor in tensors], self)
        given = call.tensors
        inputs = [self.map_of(tensor) for tensor in given]
        rule = find_rule(call)
        labels = self._label(context, rule, inputs)
        weight = all(m.weight for m in inputs)
        maps = [
            labels[i] if i < len(labels) and labels[i] is not None else LabelMap(tuple(tensor.shape), weight=weight)
            for i, tensor in enumerate(tensors)
        ]
        for place, (tensor, labelled) in enumerate(zip(tensors, maps, strict=True)):
            if tuple(tensor.shape) != labelled.shape:  # type: ignore[union-attr]
                # A use of the operator that the rule does not know: safe, if not sharp.
                for labels_given in inputs:
                    store.freeze_map(labels_given, "this use of the operator is not understood")
                maps[place] = LabelMap(tuple(tensor.shape), weight=weight)
        index = len(self.records)
        numbers = call.numbers
        sizes = rule.sizes(call, [m.shape for m in inputs]) if rule is not None and rule.sizes else None
        producers = [self._maps[id(t)][1] for t in given if id(t) in self._maps and self._maps[id(t)][1] >= 0]
        self.records.append(
            Record(
                call.name,
                stack,
                inputs,
                maps,  # type: ignore[arg-type]
                numbers,
                rule,
                sizes,
                context.cost,
                producers,
                _structure(result, given, [0]),
                [tensor.dtype for tensor in tensors],
                bool(stack) and (stack[-1] in self._certain or type(call.arguments.get("groups")) is _Stated),
                torch.Tag.pointwise in getattr(call.function, "tags", ()) and not any(result is t for t in given),
            )
        )
        for tensor, labelled in zip(tensors, maps, strict=True):
            assert labelled is not None
            self._remember(tensor, labelled, index)
        return result

    def _label(self, context: Context, rule: Rule | None, inputs: list[LabelMap]) -> list[LabelMap | None]:
        if all(0 in shape for shape in context.shapes):
            return [LabelMap(shape) for shape in context.shapes]  # nothing in it that could go
        if rule is not None:
            if rule.expected is None and not any(m.entries for m in inputs):
                weight = all(m.weight for m in inputs)
                return [LabelMap(shape, weight=weight) for shape in context.shapes]
            found = rule.label(context)
            return [found] if isinstance(found, LabelMap) else list(found)
        function = context.call.function
        if torch.Tag.pointwise in getattr(function, "tags", ()):
            return [pointwise(self.store, inputs, context.shape)]
        for labels in inputs:
            self.store.freeze_map(labels, "no rule for this operator")
        return []


def _run(model: nn.Module, inputs: Inputs, tracer: Watcher, modules: ModuleStack) -> Any:
    try:
        with tracer:
            return model(*inputs.args, **inputs.kwargs)
    except ModelError:
        raise
    except Exception as error:
        path = next((p for p in reversed(modules.deepest) if p), "")
        kind = ""
        if path:
            with contextlib.suppress(AttributeError):
                kind = f" ({type(model.get_submodule(path)).__name__})"
        raise ModelError(f"the forward of {path or type(model).__name__}{kind} fails: {one_line(error)}") from error


def trace(model: nn.Module, inputs: Inputs, modes: tuple[str, ...] = ("meta", "fake", "real")) -> Trace:
    """Label one forward pass in eval mode.

    Raises:
        ModelError: the forward fails in every mode (says in which module), or returns no tensor.
    """
    failure: ModelError | None = None
    for mode in modes:
        try:
            return _trace_once(model, inputs, mode)
        except ModelError as error:
            failure = error
    assert failure is not None
    raise failure


@contextlib.contextmanager
def _silent(name: str) -> Iterator[None]:
    """Without the tracebacks that a library logs before it raises; the error says enough."""
    logger = logging.getLogger(name)

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


@contextlib.contextmanager
def on_shapes(
    model: nn.Module,
    inputs: Inputs,
    mode: str,
    change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
) -> Iterator[tuple[nn.Module, Inputs]]:
    """A copy of the model and its inputs for one mode, and the context to run them in.

    Args:
        model: the model; not touched.
        inputs: its inputs.
        mode: ``meta`` (shapes only), ``fake`` (shapes with devices) or ``real``.
        change: what becomes of each parameter and buffer of the copy, by name.
    """
    if mode == "fake":
        from torch._subclasses.fake_tensor import FakeTensorMode

        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, _silent("torch._subclasses.fake_tensor"):
            twin = copy_structure(model, lambda name, tensor: change(name, fake.from_tensor(tensor.detach())))
            yield twin, inputs.to(lambda tensor: fake.from_tensor(tensor.detach()))
    elif mode == "meta":
        yield copy_structure(model, lambda name, tensor: change(name, shape_only(tensor))), inputs.to(shape_only)
    else:
        twin = copy_structure(model, lambda name, tensor: change(name, tensor.detach().clone()))
        yield twin, inputs.to(lambda tensor: tensor.detach().clone())


def _trace_once(model: nn.Module, inputs: Inputs, mode: str) -> Trace:
    with on_shapes(model, inputs, mode) as (twin, given):
        tracer = Tracer(twin, meta=mode == "meta")
        output = _watch(twin.eval(), given, tracer)
        if not any(True for _ in outputs_in(output)):
            raise ModelError(f"the forward of {type(model).__name__} returns no tensor, but a {type(output).__name__}")
        records = list(tracer.records)
        if mode != "real" and any(name not in tracer.parameters for name, _ in twin.named_parameters()):
            # Branches that only training takes read the same channels (auxiliary heads).
            with contextlib.suppress(ModelError):
                _watch(twin.train(), given, tracer)
        unseen = [name for name, _ in twin.named_parameters() if name not in tracer.parameters]
        if tracer.values_read and unseen:
            # Another branch may run these layers on any channel.
            tracer.store.location = ""
            for labels in tracer.parameters.values():
                tracer.store.freeze_map(
                    labels, f"a branch that depends on values may run {unseen[0]}, which was not seen"
                )
        return Trace(
            tracer.store,
            records,
            list(tracer.lengths_read.values()),
            tracer.parameters,
            mode,
            tracer.results,
        )


def _watch(twin: nn.Module, given: Inputs, tracer: Tracer) -> Any:
    """Run the forward under the tracer; what the caller sees is frozen."""
    modules = ModuleStack(twin, tracer)
    tracer.modules = modules
    for tensor in tensors_in((given.args, given.kwargs)):
        tracer._remember(tensor, LabelMap(tuple(tensor.shape)), -1)
    try:
        output = _run(twin, given, tracer, modules)
    finally:
        modules.remove()
    tracer.store.location = "model output"
    for tensor in outputs_in(output):
        tracer.store.freeze_map(tracer.map_of(tensor), "the caller sees these channels")
    return output
