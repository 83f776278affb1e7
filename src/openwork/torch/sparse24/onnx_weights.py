"""Find the constant weights of an ONNX file, as far as telling zeros from non-zeros needs it.

Weights are followed back through Identity, Cast, Transpose, Reshape, QuantizeLinear and DequantizeLinear to an
initializer or Constant node. onnx is imported on use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from openwork.errors import FileError

__all__ = ["Contraction", "contractions"]


@dataclass(frozen=True)
class Contraction:
    """A node that multiplies by a weight.

    Attributes:
        name: the node's name, else its first output's.
        operator: the node's operator.
        nonzero: booleans of the shape of the weight; None if it is not constant.
        axis: axis of the weight that the input channels run along.
        blocks: equal parts of the axis in which groups of M restart.
        reason: why `nonzero` is None.
    """

    name: str
    operator: str
    nonzero: npt.NDArray[np.bool_] | None
    axis: int = 1
    blocks: int = 1
    reason: str = ""


# Operator -> place of the weight among the inputs, and of its zero point (None: there is none).
_WEIGHT_INPUT: dict[str, tuple[int, int | None]] = {
    "Conv": (1, None),
    "ConvTranspose": (1, None),
    "Gemm": (1, None),
    "MatMul": (1, None),
    "ConvInteger": (1, 3),
    "MatMulInteger": (1, 3),
    "QLinearConv": (3, 5),
    "QLinearMatMul": (3, 5),
}


def contractions(path: Path) -> Iterator[Contraction]:
    """Every contraction with a second operand in the file's main graph, in order.

    Raises:
        FileError: the file is no ONNX model.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path)
    except (DecodeError, ValueError) as error:
        raise FileError(f"model {path} is not an ONNX file: {error}") from error
    if not model.graph.node:
        raise FileError(f"model {path} is not an ONNX file, or has no node")
    graph = _Graph(model.graph)
    for node in model.graph.node:
        place = _WEIGHT_INPUT.get(node.op_type)
        if place is None or len(node.input) <= place[0]:
            continue
        yield graph.contraction(node, *place)


class _Graph:
    def __init__(self, graph: Any) -> None:
        from onnx import numpy_helper

        self._to_array = numpy_helper.to_array
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._producers = {name: node for node in graph.node for name in node.output}

    def contraction(self, node: Any, weight_input: int, zero_input: int | None) -> Contraction:
        name = node.name or node.output[0]
        nonzero, why = self._nonzero(node.input[weight_input])
        if nonzero is not None and zero_input is not None and len(node.input) > zero_input:
            value = self._value(node.input[weight_input])
            nonzero = None if value is None else self._differs(value, node.input[zero_input], 0)
        if nonzero is None:
            return Contraction(name, node.op_type, None, reason=why or "its weight is not a constant")
        attributes = {attribute.name: attribute for attribute in node.attribute}
        group = attributes["group"].i if "group" in attributes else 1
        if node.op_type in ("Conv", "ConvInteger", "QLinearConv"):
            return Contraction(name, node.op_type, nonzero, 1)
        if node.op_type == "ConvTranspose":
            return Contraction(name, node.op_type, nonzero, 0, group)
        if node.op_type == "Gemm":
            turned = "transB" in attributes and attributes["transB"].i
            return Contraction(name, node.op_type, nonzero, 1 if turned else 0)
        return Contraction(name, node.op_type, nonzero, max(0, nonzero.ndim - 2))

    def _value(self, name: str) -> npt.NDArray[Any] | None:
        """The constant itself, through nodes that do not change values."""
        if name in self._constants:
            return np.asarray(self._to_array(self._constants[name]))
        node = self._producers.get(name)
        if node is None:
            return None
        if node.op_type == "Constant":
            held = [attribute.t for attribute in node.attribute if attribute.name == "value"]
            return np.asarray(self._to_array(held[0])) if held else None
        if node.op_type == "Identity":
            return self._value(node.input[0])
        if node.op_type == "Transpose":
            value = self._value(node.input[0])
            return None if value is None else np.transpose(value, self._permutation(node))
        return None

    def _nonzero(self, name: str) -> tuple[npt.NDArray[np.bool_] | None, str]:
        node = self._producers.get(name)
        if name in self._constants or node is None or node.op_type == "Constant":
            value = self._value(name)
            if value is None:
                return None, "its weight is an input of the graph or computed from one"
            return np.asarray(value != 0, dtype=np.bool_), ""
        if node.op_type in ("Identity", "Cast"):
            return self._nonzero(node.input[0])
        if node.op_type in ("DequantizeLinear", "QuantizeLinear"):
            if node.op_type == "QuantizeLinear":
                # Small values may become zero, zeros stay: the pattern can only get sparser.
                return self._nonzero(node.input[0])
            value = self._value(node.input[0])
            if value is None:
                return self._nonzero(node.input[0])
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
            zero_point = node.input[2] if len(node.input) > 2 else ""
            return self._differs(value, zero_point, axis), ""
        inner, why = self._nonzero(node.input[0]) if node.op_type in ("Transpose", "Reshape") else (None, "")
        if inner is None:
            return None, why or f"its weight comes from a {node.op_type} node"
        if node.op_type == "Transpose":
            return np.transpose(inner, self._permutation(node)), ""
        shape = self._value(node.input[1])
        if shape is None:
            return None, "its weight is reshaped to a size that is not constant"
        sizes = [inner.shape[place] if size == 0 else int(size) for place, size in enumerate(shape)]
        return inner.reshape(sizes), ""

    def _differs(self, value: npt.NDArray[Any], zero_point: str, axis: int) -> npt.NDArray[np.bool_]:
        zero = self._value(zero_point) if zero_point else None
        if zero is None:
            return np.asarray(value != 0, dtype=np.bool_)
        if zero.ndim == 1 and zero.size > 1:
            zero = zero.reshape([-1 if place == axis % value.ndim else 1 for place in range(value.ndim)])
        return np.asarray(value != zero, dtype=np.bool_)

    @staticmethod
    def _permutation(node: Any) -> list[int] | None:
        return next((list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"), None)
