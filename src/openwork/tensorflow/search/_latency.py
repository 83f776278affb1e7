"""Latency of the layers of a graph, as onnxruntime would run them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from openwork.retrain.latency import LatencyMeter, LayerShape, layer_table
from openwork.search.cost import LatencyCost
from openwork.tensorflow.analysis import GraphAnalysis, Layer
from openwork.tensorflow.rules import Record, attribute

__all__ = ["latency_cost"]


def latency_cost(
    analysis: GraphAnalysis, progress: Callable[[float], None] | None = None, meter: LatencyMeter | None = None
) -> LatencyCost:
    """The latency model of a graph: its two-dimensional convolutions and products with a weight; of one sample.

    Args:
        analysis: of the graph.
        progress: called with the share of the layers that is done.
        meter: keeps the measurements; give the same one again and nothing is measured twice.

    Raises:
        OpenworkError: onnx or onnxruntime is not installed.
    """
    meter = meter or LatencyMeter()
    records = {record.module: record for record in analysis.trace.records}
    tables = []
    for number, (name, layer) in enumerate(analysis.layers.items()):
        shape = _shape(layer, records[name])
        if shape is not None:
            axes = layer.in_axis, layer.out_axis
            tables.append(
                layer_table(name, shape, layer.weight.name, axes, (layer.cin, layer.cout), analysis.groups, meter)
            )
        if progress is not None:
            progress((number + 1) / len(analysis.layers))
    return LatencyCost(tables)


def _shape(layer: Layer, record: Record) -> LayerShape | None:
    """What the time of a layer depends on; None when it is of a kind that is not measured."""
    made = record.outputs[0].shape
    if layer.type == "MatMul":
        return LayerShape("MatMul", (1,), ())
    if layer.type not in ("Conv2D", "DepthwiseConv2dNative") or len(made) != 4:
        return None
    first = attribute(record.node, "data_format", "NHWC") == "NCHW"
    space = (2, 3) if first else (1, 2)
    read = [record.inputs[0].shape[axis] for axis in space]
    kernel = layer.weight.shape[:2]
    stated = attribute(record.node, "strides"), attribute(record.node, "dilations", None) or [1, 1, 1, 1]
    strides, dilations = ([values[axis] for axis in space] for values in stated)
    # Padding that gives TensorFlow's output size, the odd one at the end as SAME does.
    pads = [
        max(0, (made[axis] - 1) * stride + (size - 1) * dilation + 1 - length)
        for axis, stride, size, dilation, length in zip(space, strides, kernel, dilations, read, strict=True)
    ]
    attributes: dict[str, Any] = {
        "kernel_shape": tuple(kernel),
        "strides": tuple(strides),
        "dilations": tuple(dilations),
        "pads": (*(pad // 2 for pad in pads), *(math.ceil(pad / 2) for pad in pads)),
    }
    depthwise = layer.cin == layer.cout and (layer.type == "DepthwiseConv2dNative" or layer.groups == layer.cin > 1)
    if layer.type == "DepthwiseConv2dNative" and not depthwise:
        return None  # with a multiplier the widths are tied in another way
    return LayerShape("Conv", (1,), tuple(read), tuple(sorted(attributes.items())), layer.groups, depthwise)
