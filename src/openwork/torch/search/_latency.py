"""Latency of the layers of a torch model. What is no convolution or linear layer is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from openwork.graph.groups import PruneGroup
from openwork.retrain.latency import LatencyMeter, LayerShape, layer_table
from openwork.search.cost import LatencyCost
from openwork.torch.search._batches import Batch, device_of
from openwork.torch.search._gates import eval_mode
from openwork.torch.search._graph import layer_widths

__all__ = ["LatencyMeter", "latency_cost"]


def _shape_of(module: nn.Module, size: Sequence[int], samples: int) -> LayerShape | None:
    """The shape of a layer that reads a tensor of `size`; None when it is of a kind that is not measured."""
    if isinstance(module, nn.Linear):
        return LayerShape("MatMul", (max(1, math.prod(size[:-1]) // samples),), ())
    if not isinstance(module, nn.modules.conv._ConvNd) or len(size) != len(module.kernel_size) + 2:
        return None
    padding = module.padding if not isinstance(module.padding, str) else _same(module)
    attributes: dict[str, Any] = {
        "kernel_shape": tuple(module.kernel_size),
        "strides": tuple(module.stride),
        "dilations": tuple(module.dilation),
        "pads": (*padding, *padding),
    }
    transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    if transposed:
        attributes["output_padding"] = tuple(module.output_padding)
    depthwise = module.groups > 1 and module.groups == module.in_channels == module.out_channels
    return LayerShape(
        "ConvTranspose" if transposed else "Conv",
        (max(1, size[0] // samples),),
        tuple(size[2:]),
        tuple(sorted(attributes.items())),
        module.groups,
        depthwise,
    )


def _same(module: nn.modules.conv._ConvNd) -> tuple[int, ...]:
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    pairs = zip(module.kernel_size, module.dilation, strict=True)
    return tuple((kernel - 1) * dilation // 2 for kernel, dilation in pairs)


def latency_cost(
    model: nn.Module,
    batch: Batch,
    groups: Sequence[PruneGroup],
    meter: LatencyMeter | None = None,
    progress: Callable[[float], None] | None = None,
) -> LatencyCost:
    """The latency model of a network.

    Args:
        model: the model.
        batch: what to run once, to see the sizes of the layers' inputs; times are those of one sample.
        groups: of the analysis.
        meter: keeps the measurements; give the same one again and nothing is measured twice.
        progress: called with the share of the layers that is done.

    Raises:
        OpenworkError: onnx or onnxruntime is not installed.
    """
    meter = meter or LatencyMeter()
    seen: dict[str, list[int]] = {}
    handles = []
    for name, module in model.named_modules():
        if layer_widths(module) is not None:

            def note(_: nn.Module, arguments: tuple[Any, ...], name: str = name) -> None:
                if arguments and isinstance(arguments[0], Tensor):
                    seen.setdefault(name, list(arguments[0].shape))

            handles.append(module.register_forward_pre_hook(note))
    batch = batch.to(device_of(model))
    try:
        with torch.no_grad(), eval_mode(model):
            model(*batch.inputs.args, **batch.inputs.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    modules = dict(model.named_modules())
    tables = []
    for number, (name, size) in enumerate(seen.items()):
        shape = _shape_of(modules[name], size, batch.samples)
        widths = layer_widths(modules[name])
        if shape is not None and widths is not None:
            axes = (0, 1) if shape.operator == "ConvTranspose" and not shape.depthwise else (1, 0)
            tables.append(layer_table(name, shape, f"{name}.weight", axes, widths, groups, meter))
        if progress is not None:
            progress((number + 1) / len(seen))
    return LatencyCost(tables)
