"""Models as structure: what goes into a forward call, wrappers, copies with other tensors in them."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from openwork.errors import ConfigError, ModelError, UnsupportedModelError, wrong_model
from openwork.torch.watch import tensors_in

__all__ = [
    "Inputs",
    "all_modules",
    "all_tensors",
    "bind_inputs",
    "check_forward",
    "copy_structure",
    "one_line",
    "shape_only",
    "unwrap",
]


def all_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by path, each once; what ``named_modules`` gives, in one walk without nested generators."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found[path] = module
        children = module._modules
        if children:
            inside = path + "." if path else ""
            pending += [(inside + name, child) for name, child in reversed(children.items()) if child is not None]
    return found


def all_tensors(
    model: nn.Module, duplicates: bool = False, modules: dict[str, nn.Module] | None = None
) -> dict[str, torch.Tensor]:
    """Parameters, then buffers, by qualified name; tied ones once, under their first name, unless `duplicates`.

    With `duplicates`, modules that are used under several paths are listed under each of them. `modules` is what
    `all_modules` gave, so that it is not asked again.
    """
    found: dict[str, torch.Tensor] = {}
    if duplicates:
        _all_names(model, "", "_parameters", found)
        _all_names(model, "", "_buffers", found)
        return found
    seen: set[int] = set()
    modules = all_modules(model) if modules is None else modules
    for table in ("_parameters", "_buffers"):
        for path, module in modules.items():
            for name, tensor in module.__dict__[table].items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[f"{path}.{name}" if path else name] = tensor
    return found


@dataclass(frozen=True)
class Inputs:
    """Arguments of a forward call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def to(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        """The same with other tensors. Objects that hold tensors (a transformer's cache) are copied: a forward may
        write into them."""
        return Inputs(_map_tensors(self.args, convert), _map_tensors(self.kwargs, convert))


def _map_tensors(value: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, (list, tuple)):
        items = [_map_tensors(item, convert) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _map_tensors(item, convert) for key, item in value.items()}
    if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        try:
            return copy.deepcopy(value, {id(tensor): convert(tensor) for tensor in tensors_in(value)})
        except Exception:  # what cannot be copied (a lock, an open file) is no store of tensors
            return value
    return value


def _all_names(module: nn.Module, path: str, table: str, found: dict[str, torch.Tensor]) -> None:
    for name, tensor in getattr(module, table).items():
        if tensor is not None:
            found[f"{path}.{name}" if path else name] = tensor
    for name, child in module._modules.items():
        if child is not None:
            _all_names(child, f"{path}.{name}" if path else name, table, found)


def _not_empty(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        raise ConfigError(f"an input of shape {list(tensor.shape)} has no elements; lengths of at least 1 are needed")
    return tensor


def bind_inputs(inputs: Any) -> Inputs:
    """A tensor is the only argument, a tuple or list holds the positional ones, a mapping the keyword ones.

    Raises:
        TypeError: anything else.
    """
    if isinstance(inputs, Inputs):
        return inputs
    if isinstance(inputs, torch.Tensor):
        bound = Inputs((inputs,), {})
    elif isinstance(inputs, Mapping):
        bound = Inputs((), dict(inputs))
    elif isinstance(inputs, (tuple, list)):
        bound = Inputs(tuple(inputs), {})
    else:
        bound = None
    if bound is not None:
        bound.to(_not_empty)
        return bound
    raise TypeError(
        f"inputs is a {type(inputs).__name__}; allowed: a tensor, a tuple of arguments, a dict of keyword arguments"
    )


def unwrap(model: nn.Module, what: str = "model") -> nn.Module:
    """The module inside DataParallel or DistributedDataParallel.

    Args:
        model: the module.
        what: the argument that it was given for, for messages.

    Raises:
        UnsupportedModelError: not an nn.Module, a ScriptModule, or a lazy layer has not been run yet.
    """
    if not isinstance(model, nn.Module):
        raise wrong_model(what, model, "a torch.nn.Module")
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = model._orig_mod  # type: ignore[assignment]
        else:
            break
    for name, module in all_modules(model).items():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{what}{'.' + name if name else ''} is a {type(module).__name__} (TorchScript); its code cannot be "
                "changed, give the Python module it was made from"
            )
        if any(
            nn.parameter.is_lazy(t) for t in (*module._parameters.values(), *module._buffers.values()) if t is not None
        ):
            raise UnsupportedModelError(
                f"{what}{'.' + name if name else ''} is a {type(module).__name__} without weights yet; run the model "
                "once"
            )
    return model


def _loose_tensors(modules: dict[str, nn.Module]) -> Iterator[torch.Tensor]:
    """Tensors kept as plain attributes; non-leaf ones would make a deep copy fail."""
    for module in modules.values():
        for value in module.__dict__.values():
            if type(value) not in _COMMON and isinstance(value, torch.Tensor):
                yield value


def copy_structure(model: nn.Module, convert: Callable[[str, torch.Tensor], torch.Tensor]) -> nn.Module:
    """A deep copy in which every parameter and buffer is replaced by ``convert(name, tensor)``.

    The weights themselves are not copied on the way. Tied tensors stay tied.
    """
    memo: dict[int, Any] = {}
    modules = all_modules(model)
    for name, tensor in all_tensors(model, modules=modules).items():
        new = convert(name, tensor)
        if isinstance(tensor, nn.Parameter) and not isinstance(new, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad and new.is_floating_point())
        if new is not tensor and isinstance(tensor, nn.Parameter):
            vars(new).update(vars(tensor))  # marks that optimisers and libraries leave on parameters
        memo[id(tensor)] = new
    for tensor in _loose_tensors(modules):
        if id(tensor) not in memo and (not tensor.is_leaf or type(tensor) is torch.Tensor):
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.is_leaf and tensor.requires_grad)
    try:
        return _copy_module(model, memo)
    except Exception as error:
        place = _not_copied(model)
        raise UnsupportedModelError(
            f"{type(model).__name__}{f' (attribute {place})' if place else ''} cannot be copied by copy.deepcopy: "
            f"{one_line(error)}"
        ) from error


def _not_copied(model: nn.Module) -> str:
    """Path of the first plain attribute that copy.deepcopy refuses; empty if none does alone."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_modules", "_parameters", "_buffers"):
                continue
            try:
                copy.deepcopy(value)
            except Exception:
                return f"{name}.{attribute}" if name else attribute
    return ""


_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, FunctionType, BuiltinFunctionType, torch.Size,
          torch.dtype, torch.device)  # fmt: skip
_AS_IS = {bool, int, float, complex, str, bytes, type(None), type, torch.Size, torch.dtype, torch.device}
_LOCKS: dict[type, Callable[[], Any]] = {type(make()): make for make in (threading.Lock, threading.RLock)}
_EMPTY = (dict, list, set)
_TABLES = {dict, list, set, OrderedDict}
# What nearly all attributes are: told apart without the slower isinstance.
_COMMON = {bool, int, float, str, tuple, dict, OrderedDict, type(None)}


def _only_tensors(values: dict[Any, Any]) -> bool:
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values.values())


def _copy_module(module: nn.Module, memo: dict[Any, Any]) -> Any:
    """What copy.deepcopy makes of a module, without its cost for the dozen empty tables that each module has."""
    known = memo.get(id(module))
    if known is not None:
        return known
    kind = type(module)
    plain = memo.get(kind)
    if plain is None:
        plain = memo[kind] = _copied_by_attributes(kind)
    if not plain:
        return copy.deepcopy(module, memo)
    twin = kind.__new__(kind)
    memo[id(module)] = twin
    values = twin.__dict__
    for name, value in module.__dict__.items():
        kind = type(value)
        if kind in _AS_IS or (kind is tuple and all(type(item) in _AS_IS for item in value)):
            values[name] = value
        elif kind in _TABLES and not value:
            values[name] = memo[id(value)] = kind()  # handles of hooks refer to them
        elif name == "_modules":
            values[name] = {key: None if child is None else _copy_module(child, memo) for key, child in value.items()}
        elif name == "_parameters" or name == "_buffers":
            values[name] = {
                key: None if tensor is None else memo.get(id(tensor), tensor) for key, tensor in value.items()
            }
        elif name == "_compiled_call_impl":
            values[name] = None
        elif isinstance(value, _PLAIN):
            values[name] = value
        elif kind in _LOCKS:
            values[name] = _LOCKS[kind]()  # no copy can be made, and the copy's threads are others
        elif isinstance(value, _EMPTY) and not value:
            values[name] = copy.copy(value)
        elif isinstance(value, dict) and "cache" in name.lower() and _only_tensors(value):
            # Results kept from an earlier call, of the old sizes: the model makes them again.
            values[name] = kind() if kind in _TABLES else copy.copy(value)
        else:
            values[name] = copy.deepcopy(value, memo)
    return twin


def _copied_by_attributes(kind: Any) -> bool:
    """Whether copy.deepcopy would make a new object of this class and copy its attributes."""
    return not (
        hasattr(kind, "__deepcopy__")
        or kind.__reduce_ex__ is not object.__reduce_ex__
        or kind.__reduce__ is not object.__reduce__
        or kind.__getstate__ not in (nn.Module.__getstate__, object.__getstate__)
        or (kind.__setstate__ is not nn.Module.__setstate__ and kind.__setstate__.__module__.split(".")[0] != "torch")
    )


def check_forward(model: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """The result of a forward without gradients.

    Raises:
        ModelError: the model's own code raises (says what).
    """
    try:
        with torch.no_grad():
            return model(*arguments)
    except Exception as error:
        raise ModelError(f"the forward of {type(model).__name__} fails on input_data: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def shape_only(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device: shape, strides and type without memory."""
    if tensor.layout != torch.strided:
        return tensor.detach().to("meta")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
