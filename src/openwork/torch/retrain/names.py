"""Names and dynamic axes of an exported file, checked before the export."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from openwork.errors import ConfigError, nearest
from openwork.torch.watch import tensors_in

__all__ = ["check_names"]


def check_names(
    model: nn.Module,
    input_data: tuple[Any, ...],
    result: Any,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic_axes: Mapping[str, Any] | None,
) -> None:
    """Refuse names that an export would drop in silence.

    Args:
        model: in eval mode.
        input_data: positional arguments of forward.
        result: what forward returns for them.
        input_names, output_names, dynamic_axes: as for `export_onnx`.

    Raises:
        ConfigError: names of another kind, too many, or used twice; an axis of a name or length that is not there.
    """
    given = list(tensors_in(input_data))
    _check_list("input_names", input_names, len(given), "the model is given")
    _check_list("output_names", output_names, sum(1 for _ in tensors_in(result)), "the model returns")
    twice = sorted(set(input_names or ()) & set(output_names or ()))
    if twice:
        raise ConfigError(f"{twice[0]!r} is in input_names and in output_names; each name is used once")
    if dynamic_axes is None:
        return
    if not isinstance(dynamic_axes, Mapping):
        raise ConfigError(
            f"dynamic_axes is a {type(dynamic_axes).__name__}; a dict is needed: {{name: {{axis: name}}}}"
        )
    inputs = dict(zip(input_names or (), given)) or _by_parameter(model, input_data)
    known = [*inputs, *(output_names or ())]
    for name, axes in dynamic_axes.items():
        if name not in known:
            raise ConfigError(
                f"dynamic_axes: {name!r} is in neither input_names nor output_names; {nearest(str(name), known)}"
            )
        if not isinstance(axes, (Mapping, list, tuple)):
            raise ConfigError(f"dynamic_axes[{name!r}] is {axes!r}; {{axis: name}} or [axes] is needed")
        for axis in axes:
            rank = inputs[name].dim() if name in inputs else None
            if type(axis) is not int or axis < 0 or (rank is not None and axis >= rank):
                last = "the rank less one" if rank is None else rank - 1
                raise ConfigError(f"dynamic_axes[{name!r}]: {axis!r} is no axis; allowed: 0 to {last}")


def _check_list(field: str, names: Sequence[str] | None, count: int, has: str) -> None:
    if names is None:
        return
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{field} is {names!r}; a list of names is needed")
    if len(names) > count:
        raise ConfigError(f"{field} has {len(names)} names; {has} {count} tensor{'s' if count != 1 else ''}")
    for name in names:
        if list(names).count(name) > 1:
            raise ConfigError(f"{field}: {name!r} stands there twice")


def _by_parameter(model: nn.Module, input_data: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """Inputs by the names of forward's parameters, which the exporter gives them where no names are given."""
    parameters = inspect.signature(model.forward).parameters
    return {name: value for name, value in zip(parameters, input_data) if isinstance(value, torch.Tensor)}
