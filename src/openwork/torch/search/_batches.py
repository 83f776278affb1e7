"""Calibration data in all the shapes that callers have it in, as (inputs, label) batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openwork.errors import ConfigError
from openwork.torch.structure import Inputs, bind_inputs

__all__ = ["Batch", "read_batches"]

_LABELS = ("label", "labels", "target", "targets")


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        inputs: arguments of forward.
        label: what the loss compares the output with; None when the batch is a dict without label, for models
            that compute their loss themselves.
    """

    inputs: Inputs
    label: Any

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        moved = Inputs((self.label,), {}).to(lambda tensor: tensor.to(device))
        return Batch(self.inputs.to(lambda tensor: tensor.to(device)), moved.args[0])

    @property
    def samples(self) -> int:
        """Length of the first axis of the first input; 1 when there is none."""
        sizes = [tensor.shape[0] for tensor in _tensors(self.inputs) if tensor.ndim]
        return sizes[0] if sizes else 1

    def split(self, size: int) -> list[Batch]:
        """Pieces of at most `size` samples; the batch itself if its tensors do not all have one first axis."""
        count = self.samples
        tensors = [*_tensors(self.inputs), *_tensors(Inputs((self.label,), {}))]
        if count <= size or any(tensor.ndim == 0 or tensor.shape[0] != count for tensor in tensors):
            return [self]
        pieces = []
        for start in range(0, count, size):
            piece = slice(start, start + size)
            label = Inputs((self.label,), {}).to(lambda tensor, piece=piece: tensor[piece])  # type: ignore[misc]
            inputs = self.inputs.to(lambda tensor, piece=piece: tensor[piece])  # type: ignore[misc]
            pieces.append(Batch(inputs, label.args[0]))
        return pieces


def _tensors(inputs: Inputs) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    inputs.to(keep)
    return found


def _is_data(value: Any) -> bool:
    """Whether it may be all the inputs of one batch: a tensor, a tuple of tensors, a dict of them."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return bool(value) and all(isinstance(item, Tensor) for item in value)
    return isinstance(value, Tensor)


def _is_batch(value: Any) -> bool:
    """[data, label], [first, second, ..., label], or a dict of arguments."""
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, (tuple, list)) or len(value) < 2:
        return False
    return isinstance(value[-1], Tensor) and all(_is_data(item) for item in value[:-1])


def _as_batch(value: Any, place: str) -> Batch:
    if isinstance(value, Batch):
        return value
    if isinstance(value, Mapping):
        given = dict(value)
        name = next((name for name in _LABELS if name in given), None)
        return Batch(bind_inputs(given), given.pop(name) if name else None)
    if isinstance(value, (tuple, list)) and len(value) >= 2:
        data = value[0] if len(value) == 2 else tuple(value[:-1])
        if _is_data(data):
            return Batch(bind_inputs(data), value[-1])
    raise ConfigError(f"input_data{place} is a {type(value).__name__}; [data, label] is needed")


def read_batches(input_data: Any, count: int, device: torch.device | None = None) -> list[Batch]:
    """The first `count` batches.

    Args:
        input_data: one batch ``[data, label]`` (data: a tensor, a tuple of tensors or a dict of arguments), a
            dict of arguments with ``label`` / ``labels`` among them, or any iterable of such batches, e.g. a
            DataLoader.
        count: how many.
        device: where to put them; None leaves them.

    Raises:
        ConfigError: the data is of another kind, or holds fewer batches than `count`.
    """
    if isinstance(input_data, Tensor):
        raise ConfigError("input_data is a tensor; [data, label] is needed")
    if _is_batch(input_data):
        batches = [_as_batch(input_data, "")]
    else:
        if not isinstance(input_data, Iterable):
            raise ConfigError(f"input_data is a {type(input_data).__name__}; [data, label] is needed")
        batches = []
        for index, item in enumerate(input_data):
            if index == count:
                break
            batches.append(_as_batch(item, f"[{index}]"))
    if len(batches) < count:
        held = f"{len(batches)} batch{'' if len(batches) == 1 else 'es'}"
        raise ConfigError(f"test_iteration is {count}; input_data holds {held}, at most that is allowed")
    return [batch if device is None else batch.to(device) for batch in batches[:count]]


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer lies; the CPU when it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
