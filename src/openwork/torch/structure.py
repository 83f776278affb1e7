"""Models as structure: what goes into a forward call, wrappers, copies with other tensors in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from openwork.errors import UnsupportedModelError

__all__ = ["Inputs", "bind_inputs", "copy_structure", "one_line", "shape_only", "unwrap"]


@dataclass(frozen=True)
class Inputs:
    """Arguments of a forward call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def to(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        return Inputs(_map_tensors(self.args, convert), _map_tensors(self.kwargs, convert))


def _map_tensors(value: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, (list, tuple)):
        items = [_map_tensors(item, convert) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _map_tensors(item, convert) for key, item in value.items()}
    return value


def bind_inputs(inputs: Any) -> Inputs:
    """A tensor is the only argument, a tuple or list holds the positional ones, a mapping the keyword ones.

    Raises:
        TypeError: anything else.
    """
    if isinstance(inputs, Inputs):
        return inputs
    if isinstance(inputs, torch.Tensor):
        return Inputs((inputs,), {})
    if isinstance(inputs, Mapping):
        return Inputs((), dict(inputs))
    if isinstance(inputs, (tuple, list)):
        return Inputs(tuple(inputs), {})
    raise TypeError(
        f"inputs is a {type(inputs).__name__}; allowed: a tensor, a tuple of arguments, a dict of keyword arguments"
    )


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel or DistributedDataParallel.

    Raises:
        UnsupportedModelError: not an nn.Module, a ScriptModule, an exported or fx-lowered program.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"model is a {type(model).__name__}; a torch.nn.Module is needed")
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):  # torch.compile
        model = original
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"model{'.' + name if name else ''} is a {type(module).__name__} (TorchScript); its code cannot be "
                "changed, give the Python module it was made from"
            )
    return model


def _loose_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors kept as plain attributes; non-leaf ones would make a deep copy fail."""
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):
                yield value


def copy_structure(model: nn.Module, convert: Callable[[str, torch.Tensor], torch.Tensor]) -> nn.Module:
    """A deep copy in which every parameter and buffer is replaced by ``convert(name, tensor)``.

    The weights themselves are not copied on the way. Tied tensors stay tied.
    """
    memo: dict[int, Any] = {}
    keep = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        new = convert(name, tensor)
        if isinstance(tensor, nn.Parameter) and not isinstance(new, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad and new.is_floating_point())
        if new is not tensor:
            for attribute in ("_is_hf_initialized",):
                if hasattr(tensor, attribute):
                    setattr(new, attribute, getattr(tensor, attribute))
        memo[id(tensor)] = new
    for tensor in _loose_tensors(model):
        if id(tensor) not in memo and not tensor.is_leaf:
            memo[id(tensor)] = tensor.detach().clone()
            keep.append(tensor)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be copied by copy.deepcopy: {one_line(error)}"
        ) from error


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def shape_only(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device: shape, strides and type without memory."""
    if tensor.layout != torch.strided:
        return tensor.detach().to("meta")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
