"""The two ONNX files of a quantised model, made from the one that torch exports.

The exporters write QuantizeLinear and DequantizeLinear on inputs and weights of each quantised layer, with float
weights. From there:

* deploy, target ONNX: weights become int8, biases int32 with the scale of input times weight, both behind a
  DequantizeLinear: what onnxruntime turns into integer kernels;
* deploy, target Ascend: AscendQuant -> layer on int8 with an int32 bias -> AscendDequant;
* fake quant: inputs are rounded by Div, Round, Add, Clip, Sub, Mul; weights stay float and are multiples of their
  scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["to_ascend", "to_fake_quant", "to_integer_weights"]

_CONTRACTIONS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_BIG = 2**31 - 1


@dataclass
class _Layer:
    """A contraction whose input and weight are both dequantised."""

    node: Any
    data_quantize: Any
    data_dequantize: Any
    weight_quantize: Any
    weight_dequantize: Any
    transposes: list[Any]


class _Graph:
    """A model's graph with what is asked of it again and again."""

    def __init__(self, model: Any) -> None:
        from onnx import helper, numpy_helper

        self.graph = model.graph
        self.helper = helper
        self._numpy = numpy_helper
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}
        self.producers: dict[str, Any] = {}
        self.readers: dict[str, list[Any]] = {}
        for node in self.graph.node:
            for name in node.output:
                self.producers[name] = node
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self.outputs = {value.name for value in self.graph.output}

    def value(self, name: str) -> npt.NDArray[Any] | None:
        """A constant, also behind Identity and Constant nodes."""
        if name in self.constants:
            return np.asarray(self._numpy.to_array(self.constants[name]))
        node = self.producers.get(name)
        if node is not None and node.op_type == "Identity":
            return self.value(node.input[0])
        if node is not None and node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    return np.asarray(self._numpy.to_array(attribute.t))
        return None

    def free(self, lead: str) -> str:
        """A beginning of names, `lead` if possible, that no name of the model has."""
        taken = {*self.constants, *self.producers, *self.readers, *self.outputs}
        taken.update(value.name for value in self.graph.input)
        while any(name.startswith(lead) for name in taken):
            lead += "_"
        return lead

    def put(self, name: str, value: npt.NDArray[Any]) -> str:
        """Add an initializer; an existing one of the name is replaced."""
        tensor = self._numpy.from_array(np.ascontiguousarray(value).reshape(value.shape), name)
        if name in self.constants:
            self.constants[name].CopyFrom(tensor)
        else:
            self.graph.initializer.append(tensor)
            self.constants[name] = self.graph.initializer[-1]
        return name

    def layers(self) -> Iterator[_Layer]:
        for node in self.graph.node:
            if node.op_type not in _CONTRACTIONS:
                continue
            data = self.producers.get(node.input[0])
            transposes: list[Any] = []
            weight = self.producers.get(node.input[1])
            while weight is not None and weight.op_type == "Transpose":
                transposes.append(weight)
                weight = self.producers.get(weight.input[0])
            pair = [self._quantize_before(found) for found in (data, weight)]
            if all(found is not None for found in pair) and self.value(pair[1].input[0]) is not None:
                yield _Layer(node, pair[0], data, pair[1], weight, transposes)

    def _quantize_before(self, node: Any) -> Any:
        if node is None or node.op_type != "DequantizeLinear":
            return None
        before = self.producers.get(node.input[0])
        return before if before is not None and before.op_type == "QuantizeLinear" else None

    def integers(self, layer: _Layer) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32], int]:
        """A layer's weight as stored before any Transpose: integers, scales of its channels, channel axis."""
        quantize = layer.weight_quantize
        weight = self.value(quantize.input[0])
        scale = self.value(quantize.input[1])
        assert weight is not None
        assert scale is not None
        axis = next((attribute.i for attribute in quantize.attribute if attribute.name == "axis"), 1)
        spread = scale.reshape([-1 if place == axis else 1 for place in range(weight.ndim)]) if scale.ndim else scale
        integers = np.clip(np.rint(weight / spread), -128, 127).astype(np.int8)
        return integers, np.asarray(scale, dtype=np.float32).reshape(-1), axis

    def data_factors(self, layer: _Layer) -> tuple[float, int]:
        scale, offset = (self.value(layer.data_quantize.input[place]) for place in (1, 2))
        assert scale is not None
        assert offset is not None
        return float(scale.reshape(-1)[0]), int(offset.reshape(-1)[0])

    def steps(self, layer: _Layer, scale: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Scale of input times scale of weight, of each output channel."""
        step = (scale.astype(np.float64) * self.data_factors(layer)[0]).astype(np.float32)
        if layer.node.op_type == "ConvTranspose":
            # Its weight has the output channels of one group only.
            step = np.tile(step, next((a.i for a in layer.node.attribute if a.name == "group"), 1))
        return step

    def turned(self, layer: _Layer, integers: npt.NDArray[np.int8], axis: int) -> tuple[npt.NDArray[np.int8], int]:
        """The integers as the contraction takes them, after the Transposes on the way."""
        for transpose in reversed(layer.transposes):
            order = next((list(a.ints) for a in transpose.attribute if a.name == "perm"), None)
            order = order or list(range(integers.ndim))[::-1]
            integers = np.transpose(integers, order)
            axis = order.index(axis)
        return integers, axis

    def bias_of(self, layer: _Layer) -> tuple[Any, int]:
        """The node and place that hold a layer's bias: its own third input, or the Add after a MatMul."""
        if len(layer.node.input) > 2 and layer.node.input[2]:
            return layer.node, 2
        readers = self.readers.get(layer.node.output[0], [])
        if layer.node.op_type == "MatMul" and len(readers) == 1 and readers[0].op_type == "Add":
            for place, name in enumerate(readers[0].input):
                value = self.value(name)
                if value is not None and value.ndim == 1:
                    return readers[0], place
        return None, 0

    def clean(self) -> None:
        """Drop nodes and initializers that nothing reads any more."""
        while True:
            read = {name for node in self.graph.node for name in node.input} | self.outputs
            dead = [node for node in self.graph.node if not any(name in read for name in node.output)]
            if not dead:
                break
            for node in dead:
                self.graph.node.remove(node)
        for name in [name for name in self.constants if name not in read]:
            self.graph.initializer.remove(self.constants.pop(name))

    def before(self, node: Any, *added: Any) -> None:
        """Insert nodes in front of another."""
        place = list(self.graph.node).index(node)
        for number, new in enumerate(added):
            self.graph.node.insert(place + number, new)


def to_integer_weights(model: Any) -> Any:
    """The deploy file for ONNX runtimes, as a new model."""
    model = _copy(model)
    graph = _Graph(model)
    layers = list(graph.layers())
    start = graph.free("quantized_")
    for number, layer in enumerate(layers):
        integers, scale, axis = graph.integers(layer)
        integers, axis = graph.turned(layer, integers, axis)
        lead = f"{start}{number}"
        names = [
            graph.put(f"{lead}.weight", integers),
            graph.put(f"{lead}.weight_scale", scale),
            graph.put(f"{lead}.weight_offset", np.zeros(scale.shape, dtype=np.int8)),
        ]
        added = [graph.helper.make_node("DequantizeLinear", names, [f"{lead}.weight_value"], axis=axis)]
        layer.node.input[1] = f"{lead}.weight_value"
        holder, place = graph.bias_of(layer)
        bias = graph.value(holder.input[place]) if holder is not None else None
        if bias is not None:
            step = graph.steps(layer, scale)
            whole = np.clip(np.rint(bias.astype(np.float64) / step), -_BIG, _BIG).astype(np.int32)
            names = [
                graph.put(f"{lead}.bias", whole),
                graph.put(f"{lead}.bias_scale", step),
                graph.put(f"{lead}.bias_offset", np.zeros(step.shape, dtype=np.int32)),
            ]
            added.append(graph.helper.make_node("DequantizeLinear", names, [f"{lead}.bias_value"], axis=0))
            holder.input[place] = f"{lead}.bias_value"
        graph.before(layer.node, *added)
    for number, layer in enumerate(layers):
        _data_unsigned(graph, layer, f"{start}{number}")
    for number, layer in enumerate(layers):
        _quantize_earlier(graph, layer, f"{start}{number}")
    _store_integers(graph, f"{start}weight_")
    graph.clean()
    return model


def _data_unsigned(graph: _Graph, layer: _Layer, lead: str) -> None:
    """Quantise a layer's input to uint8, 128 more than int8: onnxruntime's fast kernels multiply uint8 by int8."""
    nodes = layer.data_quantize, layer.data_dequantize
    offset = graph.value(nodes[0].input[2])
    if offset is None or offset.dtype != np.int8:
        return  # done already: several layers read this input
    name = graph.put(f"{lead}.data_offset", (offset.astype(np.int16) + 128).astype(np.uint8))
    output = nodes[0].output[0]
    nodes[0].input[2] = name
    for value in graph.graph.value_info:
        if value.name == output:
            value.type.tensor_type.elem_type = graph.constants[name].data_type
    for reader in graph.readers[output]:
        if reader.op_type == "DequantizeLinear" and reader.input[0] == output:
            reader.input[2] = name


def _store_integers(graph: _Graph, lead: str) -> None:
    """Store constants that the file still quantises, as int8: weights of layers that compute with them on the way."""
    for number, node in enumerate([node for node in graph.graph.node if node.op_type == "QuantizeLinear"]):
        value, scale = graph.value(node.input[0]), graph.value(node.input[1])
        if value is None or scale is None or len(node.input) < 3:
            continue
        offset = graph.value(node.input[2])
        if offset is None or offset.any() or offset.dtype != np.int8:
            continue
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        spread = scale.reshape([-1 if place == axis else 1 for place in range(value.ndim)]) if scale.ndim else scale
        integers = np.clip(np.rint(value / spread), -128, 127).astype(np.int8)
        name = graph.put(f"{lead}{number}", integers)
        for reader in graph.readers.get(node.output[0], []):
            _reconnect(reader, node.output[0], name)


# Operators that only move or select values: quantising before them gives the same as quantising after.
_MOVERS = ("Flatten", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "MaxPool", "Identity")


def _quantize_earlier(graph: _Graph, layer: _Layer, lead: str) -> None:
    """Quantise also in front of operators that only move values, where the result of a layer comes in.

    A runtime makes an integer kernel of a layer only if its result, or that of an activation after it, is
    quantised at once.
    """
    first = graph.producers.get(layer.data_quantize.input[0])
    mover = None
    while (
        first is not None
        and first.op_type in _MOVERS
        and len(first.output) == 1
        and len(graph.readers[first.output[0]]) == 1
        and first.output[0] not in graph.outputs
    ):
        mover, first = first, graph.producers.get(first.input[0])
    if mover is None or first is None or len(graph.readers[mover.input[0]]) != 1:
        return
    # The constants may stand further down in the file than this place.
    values = [graph.value(name) for name in layer.data_quantize.input[1:]]
    factors = [
        graph.put(f"{lead}.early_{kind}", value)
        for kind, value in zip(("scale", "offset"), values)
        if value is not None
    ]
    names = [f"{lead}.early", f"{lead}.early_value"]
    quantize = graph.helper.make_node("QuantizeLinear", [mover.input[0], *factors], names[:1])
    dequantize = graph.helper.make_node("DequantizeLinear", [names[0], *factors], names[1:])
    place = list(graph.graph.node).index(first)
    for step, node in enumerate((quantize, dequantize), 1):
        graph.graph.node.insert(place + step, node)
    mover.input[0] = names[1]


def to_fake_quant(model: Any) -> Any:
    """The file that simulates quantisation with float operators, as a new model."""
    model = _copy(model)
    graph = _Graph(model)
    start = graph.free("fake_quant_")
    for number, layer in enumerate(list(graph.layers())):
        source = layer.weight_quantize.input[0]
        for reader in graph.readers[layer.weight_dequantize.output[0]]:
            _reconnect(reader, layer.weight_dequantize.output[0], source)
        scale, offset = graph.data_factors(layer)
        names = {
            "scale": np.float32(scale),
            "offset": np.float32(offset),
            "low": np.float32(-128),
            "high": np.float32(127),
        }
        lead = f"{start}{number}"
        constants = {key: graph.put(f"{lead}.{key}", np.asarray(value)) for key, value in names.items()}
        steps = [
            ("Div", [layer.data_quantize.input[0], constants["scale"]]),
            ("Round", []),
            ("Add", [constants["offset"]]),
            ("Clip", [constants["low"], constants["high"]]),
            ("Sub", [constants["offset"]]),
            ("Mul", [constants["scale"]]),
        ]
        nodes = []
        current = ""
        for kind, inputs in steps:
            result = f"{lead}.{kind.lower()}"
            nodes.append(graph.helper.make_node(kind, [current, *inputs] if current else inputs, [result]))
            current = result
        graph.before(layer.node, *nodes)
        layer.node.input[0] = current
    graph.clean()
    return model


def to_ascend(model: Any) -> Any:
    """The deploy file for Ascend, as a new model.

    AscendQuant(x): attributes ``scale`` = 1 / scale_d, ``offset`` and ``dst_type``; the layer takes int8 and an
    int32 bias in steps of scale_d * scale_w; AscendDequant(y, parameter): uint64 for each output channel, whose
    low 32 bits are the float32 scale_d * scale_w. The converter for the hardware takes the offset's share out of
    the bias, as it does for files of AMCT.
    """
    model = _copy(model)
    graph = _Graph(model)
    start = graph.free("ascend_")
    for number, layer in enumerate(list(graph.layers())):
        integers, scale, axis = graph.integers(layer)
        integers, axis = graph.turned(layer, integers, axis)
        data_scale, offset = graph.data_factors(layer)
        step = graph.steps(layer, scale)
        lead = f"{start}{number}"
        quantize = graph.helper.make_node(
            "AscendQuant",
            [layer.data_quantize.input[0]],
            [f"{lead}.data"],
            name=f"{lead}.quant",
            scale=1.0 / data_scale,
            offset=float(offset),
            dst_type="INT8",
        )
        layer.node.input[0] = f"{lead}.data"
        layer.node.input[1] = graph.put(f"{lead}.weight", integers)
        bias = graph.value(layer.node.input[2]) if len(layer.node.input) > 2 else None
        if bias is not None:
            whole = np.clip(np.rint(bias.astype(np.float64) / step), -_BIG, _BIG).astype(np.int32)
            layer.node.input[2] = graph.put(f"{lead}.bias", whole)
        parameter = graph.put(f"{lead}.dequant_parameter", step.view(np.uint32).astype(np.uint64))
        result = layer.node.output[0]
        layer.node.output[0] = f"{lead}.sum"
        dequantize = graph.helper.make_node(
            "AscendDequant", [f"{lead}.sum", parameter], [result], name=f"{lead}.dequant"
        )
        graph.before(layer.node, quantize)
        place = list(graph.graph.node).index(layer.node)
        graph.graph.node.insert(place + 1, dequantize)
    del model.graph.value_info[:]
    graph.clean()
    return model


def _copy(model: Any) -> Any:
    result = type(model)()
    result.CopyFrom(model)
    return result


def _reconnect(node: Any, old: str, new: str) -> None:
    for place, name in enumerate(node.input):
        if name == old:
            node.input[place] = new
