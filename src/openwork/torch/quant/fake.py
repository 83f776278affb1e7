"""Fake quantisation in training, on torch's own fake-quantise operators.

Activations, ULQ: real = (integer - offset) * scale with integers of -128 .. 127. The clip range is learned: scale
= (max - min) / 255 and offset = -128 - min / scale, and torch's learnable operator passes gradients to both. Its
first values are the extremes of the first batches.

Weights are symmetric, real = integer * scale, so that zeros stay exact zeros. ARQ takes the scale from the largest
magnitude at each forward; ULQ learns it, starting from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openwork.config import DataQuantSetting, WeightAlgorithm, WeightQuantSetting
from openwork.errors import ModelError
from openwork.retrain.clipping import range_fault

__all__ = ["InputFactors", "InputQuant", "WeightQuant"]

LOWEST, HIGHEST = -128, 127
_SMALLEST = 1e-8


@dataclass(frozen=True)
class InputFactors:
    """real = (integer - offset) * scale."""

    scale: float
    offset: int


class InputQuant(nn.Module):
    """Quantises and dequantises the input of a layer; learns its clip range.

    Args:
        setting: first clip range and whether its lower end is fixed.
        batches: training forwards that the first range is taken from, if the setting gives none.
        device: where the parameters live.
        layer: name of the layer, for messages.
    """

    seen: Tensor
    fixed: Tensor

    def __init__(self, setting: DataQuantSetting, batches: int, device: torch.device | str, layer: str = "") -> None:
        super().__init__()
        given = setting.clip_max is not None and setting.clip_min is not None
        self.clip_max = nn.Parameter(torch.tensor(setting.clip_max if given else 0.0, device=device))
        self.clip_min = nn.Parameter(torch.tensor(setting.clip_min if given else 0.0, device=device))
        # Batches seen; in the checkpoint, so that a restored model knows that its range is good.
        self.register_buffer("seen", torch.tensor(batches if given else 0, dtype=torch.int64, device=device))
        self.register_buffer("fixed", torch.tensor(bool(setting.fixed_min), device=device))
        self.batches = batches
        self.layer = layer
        self.fixed_min = setting.fixed_min
        if setting.fixed_min and given:
            self.clip_min.data.zero_()

    @property
    def calibrated(self) -> bool:
        """Whether the clip range comes from data or the config."""
        return int(self.seen) > 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.batches and torch._C._current_graph_task_id() == -1:
            self._observe(x)
        if not x.is_meta and not int(self.seen):
            return x
        scale, offset = self._range()
        # LSQ's factor keeps the step of the range in proportion to that of the weights (Esser et al. 2020).
        factor = 1.0 / max(1.0, (x.numel() * HIGHEST)) ** 0.5
        try:
            result: Tensor = torch._fake_quantize_learnable_per_tensor_affine(
                x.float(), scale.reshape(1), offset.reshape(1), LOWEST, HIGHEST, factor
            )
        except RuntimeError as error:
            fault = range_fault(*self.ends())
            if not fault:
                raise
            raise ModelError(f"layer {self.layer!r}: {fault}") from error
        return result.to(x.dtype)

    @torch.no_grad()
    def _observe(self, x: Tensor) -> None:
        if x.is_meta or int(self.seen) >= self.batches:
            return
        low, high = torch.aminmax(x.detach().float())
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise ModelError(
                f"layer {self.layer!r}: its input has NaN or infinity, from which no clip range can be taken"
            )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN)
            torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX)
        # 0 is in the range, so that padding and zeros are exact.
        low, high = low.clamp(max=0), high.clamp(min=0)
        self.clip_max.copy_(torch.maximum(self.clip_max, high))
        self.clip_min.copy_(torch.minimum(self.clip_min, low))
        self.seen += 1
        fixed = bool(self.clip_min >= 0) if self.fixed_min is None else self.fixed_min
        self.fixed.fill_(fixed)
        if fixed:
            self.clip_min.zero_()

    def _range(self) -> tuple[Tensor, Tensor]:
        # Copies: a layer that runs twice in one forward sets its range between the two, and backward needs the first.
        start, end, fixed = self.clip_min.clone(), self.clip_max.clone(), self.fixed.clone()
        low = torch.where(fixed, torch.zeros_like(start), start.clamp(max=0.0)).float()
        high = torch.maximum(end.float().clamp(min=0.0), low + _SMALLEST)
        scale = ((high - low) / (HIGHEST - LOWEST)).clamp(min=_SMALLEST)
        return scale, LOWEST - low / scale

    def ends(self) -> tuple[float, float]:
        """The ends of the clip range as they were learned."""
        return (0.0 if bool(self.fixed) else float(self.clip_min.detach())), float(self.clip_max.detach())

    @torch.no_grad()
    def factors(self) -> InputFactors:
        """The scale and offset in force, as the operator rounds them."""
        scale, offset = self._range()
        return InputFactors(float(scale), int(offset.round().clamp(LOWEST, HIGHEST)))

    def extra_repr(self) -> str:
        return f"ulq, int8, {'lower end 0' if self.fixed_min else 'both ends learned'}"


class WeightQuant(nn.Module):
    """Quantises and dequantises the weight of a layer.

    Args:
        setting: ARQ or ULQ, bits, one scale for each output channel or for the tensor.
        weight: the weight.
        axis: the axis of output channels.
    """

    def __init__(self, setting: WeightQuantSetting, weight: Tensor, axis: int) -> None:
        super().__init__()
        self.setting = setting
        self.axis = axis
        # Symmetric also in its ends: a sign change, as folding may bring, stays in range.
        self.highest = 127 if setting.dst_type == "INT8" else 7
        self.learned = setting.algorithm is WeightAlgorithm.ULQ
        if self.learned:
            self.scale = nn.Parameter(self._from_largest(weight.detach()))

    def _from_largest(self, weight: Tensor) -> Tensor:
        """[channels] or [1]: the largest magnitude becomes the highest integer."""
        values = weight.detach().float().abs()
        if self.setting.channel_wise:
            others = [axis for axis in range(values.dim()) if axis != self.axis]
            largest = values.amax(others)
        else:
            largest = values.amax().reshape(1)
        return (largest / self.highest).clamp(min=_SMALLEST)

    def scales(self, weight: Tensor) -> Tensor:
        """The scales in force for `weight`: float32 [channels] or [1]."""
        return self.scale.float().abs().clamp(min=_SMALLEST) if self.learned else self._from_largest(weight)

    def forward(self, weight: Tensor) -> Tensor:
        scale = self.scales(weight)
        values = weight.float()
        low, high = -self.highest, self.highest
        result: Tensor
        if self.learned:
            factor = 1.0 / (weight.numel() / scale.numel() * high) ** 0.5
            zero = torch.zeros_like(scale)
            if self.setting.channel_wise:
                result = torch._fake_quantize_learnable_per_channel_affine(
                    values, scale, zero, self.axis, low, high, factor
                )
            else:
                result = torch._fake_quantize_learnable_per_tensor_affine(values, scale, zero, low, high, factor)
        elif self.setting.channel_wise:
            zeros = torch.zeros_like(scale, dtype=torch.int32)
            result = torch.fake_quantize_per_channel_affine(values, scale, zeros, self.axis, low, high)
        else:
            zeros = torch.zeros_like(scale, dtype=torch.int32)
            result = torch.fake_quantize_per_tensor_affine(values, scale, zeros, low, high)
        return result.to(weight.dtype)

    @torch.no_grad()
    def integers(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The integers (int8, of the weight's shape) that `forward` rounds to, and a scale for each channel."""
        scale = self.scales(weight).detach()
        shape = [-1 if axis == self.axis else 1 for axis in range(weight.dim())]
        spread = scale.reshape(shape if scale.numel() > 1 else [1] * weight.dim())
        integers = (self.forward(weight.detach()).float() / spread).round().to(torch.int8)
        return integers, scale.expand(weight.shape[self.axis]).clone()

    def extra_repr(self) -> str:
        where = "one scale a channel" if self.setting.channel_wise else "one scale"
        return f"{self.setting.algorithm.value}, {self.setting.dst_type.lower()}, {where}"
