"""Which layers can hold an N:M mask, along which axis, and why the others cannot.

A mask runs along the input channels: axis 1 of Linear and Conv2d weights (each convolution group has its own
slice there), axis 0 of ConvTranspose2d weights, restarting in each convolution group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

__all__ = ["KINDS", "LayerKind", "kind_of", "why_not_maskable"]

# The contraction that the forward of each kind of layer calls with its weight as the second argument.
_OPERATORS: tuple[Callable[..., Any], ...] = (
    torch.conv2d,
    nn.functional.conv2d,
    nn.functional.linear,
    torch.conv_transpose2d,
    nn.functional.conv_transpose2d,
)


@dataclass(frozen=True)
class LayerKind:
    """How a kind of layer lays out its weight.

    Attributes:
        name: class name, as config files write it.
        base: the torch class.
        axis: the axis of the weight that the input channels run along.
    """

    name: str
    base: type[nn.Module]
    axis: int

    def blocks(self, layer: nn.Module) -> int:
        """Equal parts of `axis` in each of which groups restart."""
        groups: int = getattr(layer, "groups", 1)
        return groups if self.axis == 0 else 1


KINDS = (
    LayerKind("Linear", nn.Linear, 1),
    LayerKind("Conv2d", nn.Conv2d, 1),
    LayerKind("ConvTranspose2d", nn.ConvTranspose2d, 0),
)


def kind_of(layer: nn.Module) -> LayerKind | None:
    """The kind of a layer, None if its weight has no place for a mask."""
    for kind in KINDS:
        if isinstance(layer, kind.base):
            return kind
    return None


def why_not_maskable(layer: nn.Module, uses: int = 1, n: int = 2, m: int = 4) -> str:
    """Why `layer` cannot hold an N:M mask; an empty string when it can.

    Args:
        layer: any module.
        uses: how many modules hold this layer's weight.
        n: weights kept of each group.
        m: size of a group.
    """
    kind = kind_of(layer)
    if kind is None:
        return f"{type(layer).__name__} is not a Linear, Conv2d or ConvTranspose2d"
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "its weight is read by the attention module around it, not by its own forward"
    if parametrize.is_parametrized(layer, "weight"):
        return "its weight is parametrized (torch.nn.utils.parametrize)"
    weight = layer._parameters.get("weight")
    if weight is None or getattr(layer, "weight_fake_quant", None) is not None:
        return "its weight is made by another wrapper (weight norm, pruning or quantisation)"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return "its weight has no shape yet (a lazy module); run the model once first"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}, not a float"
    if uses > 1:
        return f"its weight is shared by {uses} modules"
    channels = weight.shape[kind.axis] // kind.blocks(layer)
    if channels <= n:
        return f"it has {channels} input channels per filter; {n}:{m} keeps {n} of {m}"
    if type(layer).forward is not kind.base.forward and not _contracts_with_weight(layer):
        return f"the forward of {type(layer).__name__} does not use the weight as it is"
    return ""


def _contracts_with_weight(layer: nn.Module) -> bool:
    """Whether a forward of the layer's own hands the very weight to the convolution or matrix product."""
    try:
        trial = copy.deepcopy(layer).to("meta").train(layer.training)
        watch = _WeightWatch(trial._parameters["weight"])
        dtype = watch.weight.dtype
        if isinstance(layer, nn.Linear):
            sample = torch.empty(2, layer.in_features, device="meta", dtype=dtype)
        else:
            side = [4 * size + 8 for size in layer.kernel_size]  # type: ignore[union-attr]
            channels: int = layer.in_channels  # type: ignore[assignment]
            sample = torch.empty(2, channels, *side, device="meta", dtype=dtype)
        with torch.no_grad(), watch:
            trial(sample)
    except Exception:
        # A forward that cannot be tried on such an input is not known to be safe.
        return False
    return watch.seen and not watch.otherwise


class _WeightWatch(TorchFunctionMode):
    def __init__(self, weight: Any) -> None:
        self.weight = weight
        self.seen = False
        self.otherwise = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OPERATORS:
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            if weight is self.weight:
                self.seen = True
            else:
                self.otherwise = True
        return func(*args, **kwargs)
