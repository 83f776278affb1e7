"""What torch's own layers state about the sizes of their parameters.

These layers are the vocabulary of every model; everything else is found by `openwork.torch.repair`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from openwork.graph.plan import Repair

__all__ = ["certain_repairs", "states_sizes"]

# What torch's own layers state about their parameters: (class, attribute, parameter, axis).
_STATED: tuple[tuple[type, str, str, int], ...] = (
    (nn.Linear, "in_features", "weight", 1),
    (nn.Linear, "out_features", "weight", 0),
    (nn.Bilinear, "out_features", "weight", 0),
    (nn.Bilinear, "in1_features", "weight", 1),
    (nn.Bilinear, "in2_features", "weight", 2),
    (nn.modules.batchnorm._NormBase, "num_features", "weight", 0),
    (nn.modules.batchnorm._NormBase, "num_features", "running_mean", 0),
    (nn.GroupNorm, "num_channels", "weight", 0),
    (nn.Embedding, "embedding_dim", "weight", 1),
    (nn.EmbeddingBag, "embedding_dim", "weight", 1),
    (nn.PReLU, "num_parameters", "weight", 0),
)


def certain_repairs(model: nn.Module, touched: set[str]) -> list[Repair]:
    """Attributes of torch's own layers that follow from the shapes of their cut parameters.

    Args:
        model: the model after its parameters were cut.
        touched: paths of modules that own a cut parameter.
    """
    repairs: list[Repair] = []

    def state(path: str, module: nn.Module, attribute: str, new: Any) -> None:
        old = getattr(module, attribute)
        if old != new:
            repairs.append(Repair(path, attribute, _plain(old), _plain(new)))

    for path in sorted(touched):
        module = model.get_submodule(path)
        if isinstance(module, nn.modules.conv._ConvNd):
            _state_convolution(path, module, state)
            continue
        for kind, attribute, parameter, axis in _STATED:
            tensor = getattr(module, parameter, None)
            if isinstance(module, kind) and isinstance(tensor, torch.Tensor) and hasattr(module, attribute):
                state(path, module, attribute, tensor.shape[axis])
        if isinstance(module, (nn.LayerNorm, getattr(nn, "RMSNorm", nn.LayerNorm))):
            weight = module.weight
            if isinstance(weight, torch.Tensor):
                state(path, module, "normalized_shape", tuple(weight.shape))
        if isinstance(module, nn.GroupNorm) and isinstance(module.weight, torch.Tensor):
            old = next((r.old for r in repairs if r.module == path and r.attribute == "num_channels"), None)
            if old == module.num_groups:  # one channel per group stays one channel per group
                state(path, module, "num_groups", module.weight.shape[0])
    return repairs


def states_sizes(module: nn.Module) -> bool:
    """Whether `certain_repairs` sets all that this layer's forward states about its channels."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return type(module).forward in _PLAIN_FORWARDS
    normalising = (nn.LayerNorm, nn.GroupNorm, getattr(nn, "RMSNorm", nn.LayerNorm))
    return isinstance(module, normalising) and isinstance(module.weight, torch.Tensor)


_PLAIN_FORWARDS = {kind.forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
                                             nn.ConvTranspose3d)}  # fmt: skip


def _state_convolution(path: str, module: nn.Module, state: Any) -> None:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    groups = int(module.groups)  # type: ignore[arg-type]
    old_in, old_out = int(module.in_channels), int(module.out_channels)  # type: ignore[arg-type]
    outer, inner = weight.shape[0], weight.shape[1]
    if groups > 1 and groups == old_in:
        multiplier = old_out // old_in
        groups = outer if module.transposed else outer // multiplier  # type: ignore[truthy-function]
    state(path, module, "groups", groups)
    if module.transposed:  # type: ignore[truthy-function]
        state(path, module, "in_channels", outer)
        state(path, module, "out_channels", inner * groups)
    else:
        state(path, module, "out_channels", outer)
        state(path, module, "in_channels", inner * groups)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
