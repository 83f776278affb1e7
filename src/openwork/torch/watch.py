"""See every operator that really runs, whatever the Python control flow.

A `Watcher` is entered around a forward pass. It sees ATen operators through a dispatch mode, and a few
composite functions whole (matmul, linear, reshape, attention, norms), because their parts would hide what
they mean or check sizes before an operator is reached. What is done with a call is up to `on_call`.
State lives in the watcher; nothing global is patched.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from openwork.torch.composites import COMPOSITES, SIZE_READS, VALUE_READS
from openwork.torch.shape_results import ShapeResults, empty_strided, like, refused
from openwork.torch.size_reads import plain

__all__ = ["Call", "Watcher", "outputs_in", "tensors_in"]

_CACHE = ("transformers.cache_utils", "Cache")  # told by name: nothing of transformers is needed otherwise


def tensors_in(value: Any, caches: bool = True) -> Iterator[torch.Tensor]:
    """All tensors in nested containers: mappings, sequences, dataclasses, objects such as model outputs.

    Args:
        value: anything.
        caches: also those that a transformer keeps for its own next call.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, caches)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, caches)
    elif not caches and _is_cache(value):
        return
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), caches)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        for item in vars(value).values():
            yield from tensors_in(item, caches)


def outputs_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a model's result that the caller sees. Keys and values that a transformer returns for its own
    next call are none: they go back into the layers that made them."""
    return tensors_in(value, caches=False)


def _is_cache(value: Any) -> bool:
    return any((kind.__module__, kind.__name__) == _CACHE for kind in type(value).__mro__)


def _flat_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors in an operator's arguments, which nest at most one list deep."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, torch.Tensor):
                    yield item


class Call:
    """One operator call.

    Attributes:
        name: e.g. ``aten.add.Tensor`` or ``torch.matmul``.
        function: the ATen overload or the composite function.
        arguments: values by parameter name; missing ones are not filled in, see `get`.
    """

    __slots__ = ("_schema", "arguments", "function", "name")

    def __init__(self, name: str, function: Any, arguments: dict[str, Any], schema: Any = None) -> None:
        self.name = name
        self.function = function
        self.arguments = arguments
        self._schema = schema

    def get(self, name: str, default: Any = None) -> Any:
        """Value of an argument, else the operator's own default, else `default`."""
        if name in self.arguments:
            return self.arguments[name]
        if self._schema is not None:
            for argument in self._schema.arguments:
                if argument.name == name and argument.has_default_value():
                    return argument.default_value
        return default

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensor arguments in order, also those inside lists."""
        found: list[torch.Tensor] = []
        for value in self.arguments.values():
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found.extend(item for item in value if isinstance(item, torch.Tensor))
        return found

    @property
    def numbers(self) -> dict[str, Any]:
        """Arguments that are numbers or lists of numbers."""
        result: dict[str, Any] = {}
        for name, value in self.arguments.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                result[name] = value
            elif isinstance(value, (list, tuple)) and value and all(isinstance(v, (int, float)) for v in value):
                result[name] = tuple(value)
        return result


_NAMES: dict[Any, tuple[str, tuple[str, ...]]] = {}


def _aten_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    # Names per overload are facts of the installed torch, so they may be remembered for the whole process.
    known = _NAMES.get(function)
    if known is None:
        known = (str(function), tuple(argument.name for argument in function._schema.arguments))
        _NAMES[function] = known
    name, names = known
    return Call(name, function, dict(zip(names, args, strict=False)) | kwargs, function._schema)


def _of_shape(shape: tuple[int, ...] | None, given: torch.Tensor, keeps_layout: bool) -> torch.Tensor | None:
    """A meta tensor of a shape, contiguous or laid out as `given`."""
    if shape is None:
        return None
    if keeps_layout:
        return like(given)
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return empty_strided(shape, strides[::-1], given.dtype)


class _Functions(TorchFunctionMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        watcher = self.watcher
        if watcher.paused:
            return func(*args, **kwargs)
        if watcher.sizes_handed_out:
            args = tuple([plain(value) for value in args])
            kwargs = {name: plain(value) for name, value in kwargs.items()} if kwargs else kwargs
        if func in SIZE_READS:
            axis = SIZE_READS[func](args, kwargs)
            value = func(*args, **kwargs)
            return watcher.on_size_read(args[0], axis, value)
        if func in VALUE_READS:
            watcher.on_value_read([args[0]])
            return func(*args, **kwargs)
        composite = COMPOSITES.get(func)
        if composite is not None:
            bound = composite.bind(args, kwargs)
            if bound is not None:
                args, kwargs = watcher.prepare(args, kwargs)
                bound = composite.bind(args, kwargs)
                assert bound is not None

                def run() -> Any:
                    if composite.shape is not None and args and args[0].device.type == "meta":
                        result = _of_shape(composite.shape(bound), args[0], composite.keeps_layout)
                        if result is not None:
                            return result
                    return func(*args, **kwargs)

                operator = composite.operator
                schema = None if operator is None else operator._schema
                return watcher.on_call(Call(composite.name, operator or composite, bound, schema), run)
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        args, kwargs = self.watcher.prepare(args, kwargs)
        if self.watcher.paused:
            return func(*args, **kwargs)
        return self.watcher.on_call(_aten_call(func, args, kwargs), lambda: func(*args, **kwargs))


class Watcher:
    """Base of all that watch a forward pass. Enter it as a context manager; one pass each."""

    def __init__(self, meta: bool = False, results: ShapeResults | None = None) -> None:
        self.paused = 0
        self.sizes_handed_out = False
        self._meta = meta
        self.results = results if results is not None else ShapeResults() if meta else None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Watcher:
        self._stack.enter_context(torch.no_grad())
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Operators(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Operators run inside are not watched."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def compute(self, call: Call, run: Callable[[], Any]) -> Any:
        """Run a call unwatched; on meta tensors without running it where its result is known."""
        self.paused += 1
        try:
            known = refused(call)
            if known is not None:
                return known
            return run() if self.results is None else self.results.of(call, run)
        finally:
            self.paused -= 1

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """On shapes only: constants that the model makes on another device join the others on meta."""
        if not self._meta:
            return args, kwargs
        devices = {tensor.device.type for tensor in _flat_tensors(args, kwargs) if tensor.dim()}
        if len(devices) < 2 or "meta" not in devices:
            return args, kwargs
        with self.pause():
            return self._to_meta(args), self._to_meta(kwargs)

    def _to_meta(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == "meta":
                return value
            moved = value.to("meta")
            self.on_moved(value, moved)
            return moved
        if isinstance(value, (list, tuple)):
            return type(value)(self._to_meta(item) for item in value)
        if isinstance(value, dict):
            return {name: self._to_meta(item) for name, item in value.items()}
        return value

    def on_moved(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """A constant was moved to the meta device."""

    def on_opaque(self, module: torch.nn.Module, name: str, args: Any, kwargs: Any) -> None:
        """A module that is run without being watched is entered."""

    def on_value_read(self, tensors: list[torch.Tensor]) -> None:
        """Python code reads values of tensors."""

    def on_size_read(self, tensor: torch.Tensor, axis: int | None, value: Any) -> Any:
        """Python code reads the length of an axis (None: of all). Returns what the code gets: the value, or a
        `WatchedSize` (then `sizes_handed_out` has to be set)."""
        return value

    def on_call(self, call: Call, run: Callable[[], Any]) -> Any:
        """An operator is called; `run` runs it. Returns what the model gets."""
        raise NotImplementedError
