"""Weights that more than their own layer's forward reads.

A mask that changes, or simulated quantisation, acts where a layer's forward takes its weight. Code that takes the
same weight past the layer (an autoencoder whose decoder is the transposed encoder) would go on with the plain values.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from openwork.errors import ModelError
from openwork.torch.structure import Inputs, one_line
from openwork.torch.trace import on_shapes
from openwork.torch.watch import tensors_in

__all__ = ["read_past_layers"]


class _Reads(TorchFunctionMode):
    """Notes the layers whose weight is read while they do not run."""

    def __init__(self, model: nn.Module, layers: Collection[str]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._running: dict[str, int] = dict.fromkeys(layers, 0)
        self._names: dict[int, str] = {}
        for name in layers:
            layer = model.get_submodule(name)
            weight = layer._parameters.get("weight")
            if weight is None:
                continue
            self._names[id(weight)] = name
            layer.register_forward_pre_hook(lambda module, args, name=name: self._enter(name, 1))  # type: ignore[misc]
            layer.register_forward_hook(lambda module, args, result, name=name: self._enter(name, -1), always_call=True)  # type: ignore[misc]

    def _enter(self, name: str, step: int) -> None:
        self._running[name] += step

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Shapes, types and devices are no values.
        if any(True for _ in tensors_in(result)):
            for tensor in tensors_in((args, kwargs)):
                name = self._names.get(id(tensor))
                if name is not None and not self._running[name]:
                    self.found.add(name)
        return result


def read_past_layers(model: nn.Module, inputs: Inputs, layers: Collection[str]) -> set[str]:
    """Layers of `layers` whose weight the forward of `model` also reads outside their own forward.

    The model runs once in eval mode, on shapes where it can.

    Raises:
        ModelError: the forward fails (says why).
    """
    failure: Exception | None = None
    for mode in ("meta", "fake", "real") if layers else ():
        try:
            with on_shapes(model, inputs, mode) as (twin, given), torch.no_grad():
                reads = _Reads(twin.eval(), layers)
                with reads:
                    twin(*given.args, **given.kwargs)
                return reads.found
        except Exception as error:  # whatever the model's own code raises
            failure = error
    if failure is not None:
        raise ModelError(f"the forward of {type(model).__name__} fails: {one_line(failure)}") from failure
    return set()
