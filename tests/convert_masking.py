"""Mask the weights of an ONNX model to 2:4, for tests and benchmarks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from openwork.convert.detect import detect
from openwork.onnx.modelfile import ModelFile


def keep_two_of_four(weight: np.ndarray, axis: int) -> np.ndarray:
    """The two elements of largest magnitude of each group of four along an axis; others become +0."""
    moved = np.moveaxis(weight, axis, -1)
    length = moved.shape[-1]
    padded = np.zeros((*moved.shape[:-1], -(-length // 4) * 4), weight.dtype)
    padded[..., :length] = moved
    groups = padded.reshape(*padded.shape[:-1], -1, 4)
    order = np.argsort(-np.abs(groups.astype(np.float64)), axis=-1, kind="stable")
    np.put_along_axis(groups, order[..., 2:], 0, axis=-1)
    return np.ascontiguousarray(np.moveaxis(groups.reshape(padded.shape)[..., :length], -1, axis))


def mask_to_24(path: Path) -> onnx.ModelProto:
    """The model with every weight that could qualify masked by magnitude."""
    file = ModelFile.load(path)
    model = onnx.load(path)
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    constants = {node.output[0]: node for node in model.graph.node if node.op_type == "Constant"}
    for layer in detect(file).layers:
        shared = layer.reason is not None and not layer.reason.startswith("not 2:4")
        if shared or layer.source is None or layer.view is None or layer.zero_point:
            continue
        name = layer.source.value.name
        target = initializers.get(name)
        if target is None and name in constants:
            target = constants[name].attribute[0].t
        if target is None:
            continue
        array = numpy_helper.to_array(target)
        masked = keep_two_of_four(array.reshape(layer.view.shape), layer.view.axis).reshape(array.shape)
        own = target.name
        target.CopyFrom(numpy_helper.from_array(masked, own))
    file.close()
    return model
