"""Integers that constant folding turned into floats on the way to ONNX, put back.

A quantised TensorFlow graph multiplies int8 weights by their scales. tf2onnx computes the product, may fold a batch
norm into it, and moves axes. What comes out is still integers times one number for each output channel: it is
replaced by the integers behind a DequantizeLinear, so that they are stored, and compressed, as int8.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["integer_weights", "restore_integers"]

# From TensorFlow's filters to ONNX's, and the two orders of a matrix.
_ORDERS = ((0, 1, 2, 3), (3, 2, 0, 1), (0, 1), (1, 0))


def integer_weights(graph: Any) -> list[np.ndarray]:
    """int8 constants that a GraphDef casts and multiplies by another constant."""
    import tensorflow as tf

    nodes = {node.name: node for node in graph.node}
    found = []
    for node in graph.node:
        if node.op != "Mul" or len(node.input) != 2:
            continue
        cast, scale = (nodes.get(name.removesuffix(":0")) for name in node.input)
        if cast is None or scale is None or cast.op != "Cast" or scale.op != "Const":
            continue
        source = nodes.get(cast.input[0].removesuffix(":0"))
        if source is not None and source.op == "Const" and source.attr["dtype"].type == tf.int8.as_datatype_enum:
            values = tf.make_ndarray(source.attr["value"].tensor)
            if values.ndim in (2, 4) and np.abs(values.astype(np.int16)).max(initial=0) <= 127:
                found.append(values)
    return found


def restore_integers(model: Any, weights: Iterable[np.ndarray]) -> int:
    """Put integers back into a ModelProto, in place.

    Args:
        model: what tf2onnx made.
        weights: from `integer_weights`.

    Returns:
        how many weights are integers again.
    """
    from onnx import TensorProto, helper, numpy_helper

    opset = max((item.version for item in model.opset_import if item.domain in ("", "ai.onnx")), default=1)
    known = list(weights)
    count = 0
    for tensor in list(model.graph.initializer) if opset >= 13 else ():
        if tensor.data_type != TensorProto.FLOAT or len(tensor.dims) not in (2, 4):
            continue
        found = _matching(numpy_helper.to_array(tensor), known)
        if found is None:
            continue
        integers, axis, scale = found
        made = [f"{tensor.name}.integers", f"{tensor.name}.scale", f"{tensor.name}.zero_point"]
        for part, array in zip(made, (integers, scale, np.zeros(scale.shape, np.int8)), strict=True):
            model.graph.initializer.append(numpy_helper.from_array(array, part))
        node = helper.make_node("DequantizeLinear", made, [tensor.name], name=f"{tensor.name}.dequantized")
        node.attribute.append(helper.make_attribute("axis", axis))
        model.graph.node.insert(0, node)
        model.graph.initializer.remove(tensor)
        count += 1
    return count


def _matching(values: np.ndarray, known: list[np.ndarray]) -> tuple[np.ndarray, int, np.ndarray] | None:
    """Integers, axis of the channels and a scale for each, whose product is `values`; None if none fits."""
    for original in known:
        for order in _ORDERS:
            if len(order) != original.ndim or tuple(original.shape[i] for i in order) != values.shape:
                continue
            integers = np.ascontiguousarray(original.transpose(order))
            if values[integers == 0].any():
                continue
            for axis in (0, 1) if values.ndim == 4 else (1, 0):
                fitted = _fitted(values, integers, axis)
                if fitted is not None:
                    return fitted[0], axis, fitted[1]
    return None


def _fitted(values: np.ndarray, integers: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray] | None:
    others = tuple(place for place in range(values.ndim) if place != axis)
    whole = integers.astype(np.float64)
    power = (whole * whole).sum(others)
    scale = np.divide((values * whole).sum(others), power, out=np.ones_like(power), where=power > 0)
    sign = np.where(scale < 0, -1, 1)  # a folded batch norm may turn a channel round
    spread = [-1 if place == axis else 1 for place in range(values.ndim)]
    found = (integers * sign.reshape(spread)).astype(np.int8)
    scale = np.abs(scale).astype(np.float32)
    product = found * scale.reshape(spread)
    if not scale.all() or not np.allclose(product, values, rtol=1e-5, atol=1e-6 * float(np.abs(values).max(initial=0))):
        return None
    return found, scale
