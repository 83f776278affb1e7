"""From a trained, quantised model to the one that is exported: plain layers with integers in their weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from openwork.errors import ModelError
from openwork.record import QuantFactors
from openwork.retrain.clipping import range_fault
from openwork.sparsity.masks import check
from openwork.torch.quant.apply import quantized_layers
from openwork.torch.quant.fake import HIGHEST, LOWEST, InputFactors
from openwork.torch.quant.folding import norm_factors, norms_after
from openwork.torch.quant.module import current_weight, output_axis, unquantize_layer
from openwork.torch.sparse24 import finalize
from openwork.torch.sparse24.module import is_masked, state_of

__all__ = ["LayerIntegers", "deploy_model", "factors_of", "integers_of"]


@dataclass(frozen=True, eq=False)
class LayerIntegers:
    """A quantised layer in integers.

    Attributes:
        data: scale and offset of the input.
        weight: int8, of the weight's shape.
        scale: float32, one for each output channel.
        bias: float32 [output channels] or None, the batch norm folded in.
        norm: name of the batch norm that was folded in; empty if none.
        bits: 8 or 4.
    """

    data: InputFactors
    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    norm: str
    bits: int


@torch.no_grad()
def integers_of(model: nn.Module, inputs: Sequence[Any]) -> dict[str, LayerIntegers]:
    """The integers of all quantised layers, batch norms folded.

    Args:
        model: from `apply_quant`, trained.
        inputs: positional inputs; the model is run once to find the batch norms.

    Raises:
        ModelError: a layer's clip range was never calibrated, training diverged, or masked integers break their
            pattern.
    """
    layers = quantized_layers(model)
    for name, layer in layers.items():
        _check_trained(name, layer)
    modules = dict(model.named_modules())
    norms = norms_after(model, inputs, list(layers))
    result = {}
    for name, layer in layers.items():
        result[name] = _integers(layer, norms.get(name, ""), modules)
        if is_masked(layer):
            state = state_of(layer)
            setting = state.setting
            found = check(result[name].weight, state.axis, setting.n, setting.m, state.blocks)
            if not found:
                raise ModelError(
                    f"layer {name!r}: {found.broken} groups of its integers have more than {setting.n} of "
                    f"{setting.m} non-zeros, first at {list(found.first or ())}"
                )
    return result


def _check_trained(name: str, layer: Any) -> None:
    data, weight = layer.input_quant, current_weight(layer)
    if not data.calibrated:
        raise ModelError(
            f"layer {name!r}: its clip range was never calibrated; run at least one batch in training mode first"
        )
    low, high = data.ends()
    fault = "" if low == high == 0 else range_fault(low, high)  # inputs of nothing but zeros stay so
    if fault:
        raise ModelError(f"layer {name!r}: {fault}")
    for what, values in (("weight", weight), ("scale of weights", layer.weight_quant.scales(weight))):
        if not torch.isfinite(values).all():
            raise ModelError(f"layer {name!r}: its {what} has NaN or infinity: training diverged")


def _integers(layer: Any, norm: str, modules: dict[str, nn.Module]) -> LayerIntegers:
    axis = output_axis(layer)
    integers, scale = layer.weight_quant.integers(current_weight(layer))
    bias = None if layer.bias is None else layer.bias.detach().float()
    if norm:
        factor, shift = norm_factors(modules[norm])
        shape = [-1 if place == axis else 1 for place in range(integers.dim())]
        integers = (integers * torch.sign(factor).to(torch.int8).reshape(shape)).to(torch.int8)
        # A factor of 0 leaves zeros, for which any scale will do.
        scale = torch.where(factor == 0, scale.double(), scale.double() * factor.abs()).float()
        bias = (shift if bias is None else bias.double() * factor + shift).float()
    bits = 8 if layer.weight_quant.highest == 127 else 4
    return LayerIntegers(layer.input_quant.factors(), integers, scale, bias, norm, bits)


def factors_of(layers: dict[str, LayerIntegers]) -> dict[str, QuantFactors]:
    """What the record says of quantised layers."""
    result = {}
    for name, layer in layers.items():
        scales = layer.scale.numpy()
        if bool((scales == scales[0]).all()):
            scales = scales[:1]
        result[name] = QuantFactors(
            scale_d=layer.data.scale,
            offset_d=layer.data.offset,
            scale_w=scales,
            offset_w=np.zeros(scales.shape, dtype=np.int32),
            dst_type=f"INT{layer.bits}",
            act_type="INT8",
            wts_type=f"INT{layer.bits}",
        )
    return result


class QuantizedForExport(nn.Module):
    """A layer whose quantisation the ONNX exporters write as QuantizeLinear and DequantizeLinear."""

    scale: Tensor
    offset: Tensor

    def __init__(self, layer: nn.Module, integers: LayerIntegers) -> None:
        super().__init__()
        self.layer = layer
        self.axis = output_axis(layer)
        self.data_scale, self.data_offset = integers.data.scale, integers.data.offset
        scale = integers.scale
        shape = [-1 if place == self.axis else 1 for place in range(integers.weight.dim())]
        # An integer times its scale comes back as that integer.
        weight = integers.weight.float() * scale.reshape(shape)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if integers.bias is not None:
            layer.bias = nn.Parameter(integers.bias.clone(), requires_grad=False)
        self.register_buffer("scale", scale.clone())
        self.register_buffer("offset", torch.zeros(scale.numel(), dtype=torch.int32))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = torch.fake_quantize_per_tensor_affine(x, self.data_scale, self.data_offset, LOWEST, HIGHEST)
        layer: Any = self.layer
        weight = torch.fake_quantize_per_channel_affine(
            layer.weight, self.scale, self.offset, self.axis, LOWEST, HIGHEST
        )
        if isinstance(layer, nn.Linear):
            return functional.linear(x, weight, layer.bias)
        if isinstance(layer, nn.Conv2d):
            return layer._conv_forward(x, weight, layer.bias)
        return functional.conv_transpose2d(
            x, weight, layer.bias, layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        )


def deploy_model(model: nn.Module, layers: dict[str, LayerIntegers]) -> nn.Module:
    """A copy in float32, in evaluation, with quantised layers ready for export and folded batch norms gone.

    It computes what the trained model computes in evaluation.
    """
    result = copy.deepcopy(model)
    for layer in quantized_layers(result).values():
        unquantize_layer(layer)
    result = finalize(result).float().cpu().eval()
    for name, integers in layers.items():
        _set(result, name, QuantizedForExport(result.get_submodule(name), integers))
        if integers.norm:
            _set(result, integers.norm, nn.Identity())
    return result.eval()


def _set(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
