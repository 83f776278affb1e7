"""From a trained, quantised model to the one that is exported: plain layers with integers in their weights."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from openwork.errors import ModelError
from openwork.record import QuantFactors
from openwork.retrain.clipping import range_fault
from openwork.sparsity.masks import check
from openwork.torch.quant.apply import quantized_layers
from openwork.torch.quant.fake import HIGHEST, LOWEST, InputFactors
from openwork.torch.quant.folding import norm_factors, norms_after
from openwork.torch.quant.module import current_weight, output_axis, unquantize_layer, with_input
from openwork.torch.sparse24 import finalize
from openwork.torch.sparse24.apply import copy_model, keep_forwards
from openwork.torch.sparse24.module import is_masked, state_of, with_weight

_LOG = logging.getLogger("openwork")

__all__ = ["LayerIntegers", "deploy_model", "factors_of", "integers_of"]

_SMALLEST = 1e-20  # of scales: times the scale of an input it is still a normal float32
_MOST_STEPS = 2.0**30  # of a bias


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
    """The integers of all quantised layers that the forward reaches, batch norms folded.

    Args:
        model: from `apply_quant`, trained.
        inputs: positional inputs; the model is run once to find the batch norms.

    Raises:
        ModelError: a layer's clip range was never calibrated, training diverged, or masked integers break their
            pattern.
    """
    layers = quantized_layers(model)
    modules = dict(model.named_modules())
    norms, reached = norms_after(model, inputs, list(layers))
    for name in [name for name in layers if name not in reached]:
        _LOG.info("%s is not quantised: the forward does not reach it with these inputs", name)
        del layers[name]
    for name, layer in layers.items():
        _check_trained(name, layer)
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
    data = layer.input_quant.factors()
    integers, scale = _wide_enough(integers, scale, bias, data.scale, axis)
    bits = 8 if layer.weight_quant.highest == 127 else 4
    return LayerIntegers(data, integers, scale, bias, norm, bits)


def _wide_enough(
    integers: Tensor, scale: Tensor, bias: Tensor | None, data_scale: float, axis: int
) -> tuple[Tensor, Tensor]:
    """Integers and scales of channels with weights so small that an int32 bias could not hold their bias in steps of
    input scale times weight scale: larger scales, for which the weights round to smaller integers."""
    least = torch.full_like(scale, _SMALLEST)
    if bias is not None:
        # A grouped transposed convolution has one scale for the same place of each group.
        largest = bias.double().abs().reshape(-1, scale.numel()).amax(0)
        least = torch.maximum(least, (largest / (data_scale * _MOST_STEPS)).float())
    wider = torch.maximum(scale, least)
    shape = [-1 if place == axis else 1 for place in range(integers.dim())]
    rounded = (integers.double() * (scale.double() / wider.double()).reshape(shape)).round().to(torch.int8)
    return rounded, wider


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


class _ExportedLayer:
    """Mixed into the class of a layer, in front of it: its quantisation, as the ONNX exporters write it with
    QuantizeLinear and DequantizeLinear. All else of the layer stays: its own forward, its hooks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self
        data: InputFactors = layer._openwork_data
        args, kwargs = with_input(
            lambda x: torch.fake_quantize_per_tensor_affine(x, data.scale, data.offset, LOWEST, HIGHEST), args, kwargs
        )
        weight = torch.fake_quantize_per_channel_affine(
            layer.weight, layer.openwork_scale, layer.openwork_offset, output_axis(layer), LOWEST, HIGHEST
        )
        return with_weight(layer, weight, *args, **kwargs)


def _prepare(layer: Any, integers: LayerIntegers) -> None:
    """Turn a plain layer, in place, into one that is exported with its quantisation."""
    scale = integers.scale
    shape = [-1 if place == output_axis(layer) else 1 for place in range(integers.weight.dim())]
    # An integer times its scale comes back as that integer.
    layer.weight = nn.Parameter(integers.weight.float() * scale.reshape(shape), requires_grad=False)
    if integers.bias is not None:
        layer.bias = nn.Parameter(integers.bias.clone(), requires_grad=False)
    layer.register_buffer("openwork_scale", scale.clone())
    layer.register_buffer("openwork_offset", torch.zeros(scale.numel(), dtype=torch.int32))
    layer._openwork_data = integers.data
    plain: Any = type(layer)
    layer.__class__ = type(plain.__name__, (_ExportedLayer, plain), {"_openwork_plain": plain})


def deploy_model(model: nn.Module, layers: dict[str, LayerIntegers]) -> nn.Module:
    """A copy in float32, in evaluation, with quantised layers ready for export and folded batch norms gone.

    It computes what the trained model computes in evaluation.
    """
    result = copy_model(model)
    for layer in quantized_layers(result).values():
        unquantize_layer(layer)
    result = finalize(result).float().cpu().eval()
    for name, integers in layers.items():
        _prepare(result.get_submodule(name), integers)
    keep_forwards(result, lambda layer: isinstance(layer, _ExportedLayer))
    folded = [result.get_submodule(integers.norm) for integers in layers.values() if integers.norm]
    for parent in result.modules():
        for child, module in parent._modules.items():
            # A module may stand under several names.
            if any(module is norm for norm in folded):
                parent._modules[child] = nn.Identity()
    return result.eval()
