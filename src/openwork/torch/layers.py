"""What torch's own layers state about the sizes of their parameters.

These layers are the vocabulary of every model; everything else is found by `openwork.torch.repair`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from openwork.graph.plan import Cut, Repair
from openwork.torch.structure import all_modules, all_tensors

__all__ = ["certain_repairs", "cut_shapes", "states_sizes"]

# What torch's own layers state about their parameters: (class, attribute, parameter, axis).
_STATED: tuple[tuple[type, str, str, int], ...] = (
    (nn.Linear, "in_features", "weight", 1),
    (nn.Linear, "out_features", "weight", 0),
    (nn.Bilinear, "out_features", "weight", 0),
    (nn.Bilinear, "in1_features", "weight", 1),
    (nn.Bilinear, "in2_features", "weight", 2),
    (nn.modules.batchnorm._NormBase, "num_features", "weight", 0),
    (nn.GroupNorm, "num_channels", "weight", 0),
    (nn.Embedding, "embedding_dim", "weight", 1),
    (nn.EmbeddingBag, "embedding_dim", "weight", 1),
    (nn.PReLU, "num_parameters", "weight", 0),
)


def certain_repairs(model: nn.Module, shapes: Mapping[int, tuple[int, ...]]) -> list[Repair]:
    """Attributes of torch's own layers that follow from the shapes of their cut parameters.

    Args:
        model: the unpruned model.
        shapes: shape after the cut of each parameter and buffer that is cut, by the tensor's ``id`` (tied
            parameters have several names).
    """
    repairs: list[Repair] = []

    def state(path: str, module: Any, attribute: str, new: Any) -> None:
        old = getattr(module, attribute)
        if old != new:
            repairs.append(Repair(path, attribute, _plain(old), _plain(new)))

    for path, module in all_modules(model).items():
        tensors = {
            name: tensor
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        if "weight" not in tensors and isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
            tensors |= _computed_weight(module)
        if not any(id(tensor) in shapes for tensor in tensors.values()):
            continue
        own = {name: shapes.get(id(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
        if isinstance(module, nn.modules.conv._ConvNd):
            if "weight" in own:
                _state_convolution(path, module, own["weight"], state)
            continue
        if isinstance(module, nn.modules.batchnorm._NormBase) and "running_mean" in own and "weight" not in own:
            state(path, module, "num_features", own["running_mean"][0])
        for kind, attribute, parameter, axis in _STATED:
            if isinstance(module, kind) and parameter in own and hasattr(module, attribute):
                state(path, module, attribute, own[parameter][axis])
        if isinstance(module, (nn.LayerNorm, getattr(nn, "RMSNorm", nn.LayerNorm))) and "weight" in own:
            state(path, module, "normalized_shape", own["weight"])
        if isinstance(module, nn.GroupNorm) and "weight" in own and module.num_groups == module.num_channels:
            state(path, module, "num_groups", own["weight"][0])  # one channel per group stays so
    return repairs


def _computed_weight(module: Any) -> dict[str, torch.Tensor]:
    """What stands for the weight of a layer under weight or spectral norm: the tensor it is computed from."""
    inside = getattr(getattr(module, "parametrizations", None), "_modules", {}).get("weight")
    found = [module._parameters.get("weight_v"), module._parameters.get("weight_orig")]
    if inside is not None:
        found += [inside._parameters.get("original1"), inside._parameters.get("original")]
    if isinstance(module, nn.Linear):
        expected: tuple[int, ...] = (module.out_features, module.in_features)
    else:
        expected = (module.out_channels, module.in_channels // module.groups)
        if module.transposed:
            expected = (module.in_channels, module.out_channels // module.groups)
    fitting = (tensor for tensor in found if tensor is not None and tuple(tensor.shape[:2]) == expected)
    return dict(zip(("weight",), fitting, strict=False))


def cut_shapes(model: nn.Module, cuts: Mapping[str, Sequence[Cut]]) -> dict[int, tuple[int, ...]]:
    """Shape after the cut of each tensor that is cut, by its ``id``.

    Args:
        model: the unpruned model.
        cuts: cuts by parameter name.
    """
    shapes = {}
    for name, tensor in all_tensors(model).items():
        if name in cuts:
            shape = list(tensor.shape)
            for cut in cuts[name]:
                shape[cut.axis] -= len(cut.removed) // cut.blocks
            shapes[id(tensor)] = tuple(shape)
    return shapes


def states_sizes(module: nn.Module) -> bool:
    """Whether `certain_repairs` sets all that this layer's forward states about its channels."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return type(module).forward in _PLAIN_FORWARDS
    normalising = (nn.LayerNorm, nn.GroupNorm, getattr(nn, "RMSNorm", nn.LayerNorm))
    return isinstance(module, normalising) and isinstance(module.weight, torch.Tensor)


_PLAIN_FORWARDS = {kind.forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
                                             nn.ConvTranspose3d)}  # fmt: skip


def _state_convolution(path: str, module: Any, weight: tuple[int, ...], state: Any) -> None:
    groups, old_in, old_out = module.groups, module.in_channels, module.out_channels
    outer, inner = weight[0], weight[1]
    if groups > 1 and groups == old_in:
        groups = outer if module.transposed else outer // (old_out // old_in)
    state(path, module, "groups", groups)
    into, out = (outer, inner * groups) if module.transposed else (inner * groups, outer)
    state(path, module, "in_channels", into)
    state(path, module, "out_channels", out)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
