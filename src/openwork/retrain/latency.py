"""Latency of each layer, measured with onnxruntime on the CPU over a grid of widths.

A layer is run as a single ONNX node with random weights; its time is the node's own kernel time from the
runtime's profile, so that layout changes at the ends of the graph do not count. Layers of equal shape are measured
once.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from openwork.errors import OpenworkError
from openwork.graph.groups import AxisSize, PruneGroup
from openwork.search.cost import LayerTable
from openwork.search.cost._latency import grid, interpolator

__all__ = ["LatencyMeter", "LayerShape", "axis_length", "layer_table", "node_graph"]


@dataclass(frozen=True)
class LayerShape:
    """Everything but the widths that the time of a layer depends on; channels first, as in ONNX."""

    operator: str  # Conv, ConvTranspose, MatMul
    leading: tuple[int, ...]  # sizes before the channel axis
    trailing: tuple[int, ...]  # and after it
    attributes: tuple[tuple[str, Any], ...] = ()
    groups: int = 1
    depthwise: bool = False


_MOST_WEIGHTS = 1 << 25


@dataclass
class LatencyMeter:
    """Measures layers and remembers what it measured.

    Attributes:
        threads: of the runtime.
        repeats: runs of each layer; the fastest counts, as noise only ever adds.
        points: block edges on each axis of the grid; see `openwork.search.cost`.
        measured: seconds by (shape, input width, output width).
    """

    threads: int = 1
    repeats: int = 7
    points: int = 3
    measured: dict[tuple[LayerShape, int, int], float] = field(default_factory=dict)

    def table(self, shape: LayerShape, inputs: Sequence[int], outputs: Sequence[int]) -> np.ndarray:
        """Seconds [inputs, outputs]; what was measured before is not measured again."""
        wanted = [
            (i, o)
            for i in inputs
            for o in outputs
            if (shape, i, o) not in self.measured and (not shape.depthwise or i == o)
        ]
        while wanted:
            # One graph holds the weights of many widths; it must stay below the 2 GB that protobuf can write.
            count, room = 0, _MOST_WEIGHTS
            while count < len(wanted) and (count == 0 or room > 0):
                room -= wanted[count][0] * wanted[count][1] * math.prod(dict(shape.attributes).get("kernel_shape", ()))
                count += 1
            part, wanted = wanted[:count], wanted[count:]
            self.measured.update(zip(((shape, i, o) for i, o in part), self._run(shape, part), strict=True))
        if shape.depthwise:
            return np.array([[self.measured[shape, i, i]] for i in inputs])
        return np.array([[self.measured[shape, i, o] for o in outputs] for i in inputs])

    def _run(self, shape: LayerShape, widths: Sequence[tuple[int, int]]) -> list[float]:
        """Run one node for each pair of widths in one graph, and read their times from the profile."""
        try:
            import onnxruntime
        except ImportError as error:
            raise OpenworkError("cost LATENCY needs onnx and onnxruntime; install openwork[onnx]") from error
        model, feeds = node_graph(shape, widths)
        with tempfile.TemporaryDirectory() as folder:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = self.threads
            options.inter_op_num_threads = 1
            options.log_severity_level = 3
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "profile")
            session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            for _ in range(self.repeats + 1):
                session.run(None, feeds)
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        times: dict[int, list[float]] = {}
        for event in events:
            name, _, ending = event.get("name", "").rpartition("_kernel_time")
            if event.get("cat") == "Node" and not ending and name.startswith("layer"):
                times.setdefault(int(name.removeprefix("layer").split("_")[0]), []).append(event["dur"])
        return [min(times[number][1:]) * 1e-6 for number in range(len(widths))]


def node_graph(shape: LayerShape, widths: Sequence[tuple[int, int]]) -> tuple[bytes, dict[str, np.ndarray]]:
    """An ONNX model with a node ``layer<i>`` for each pair of widths, and its feeds."""
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    nodes, weights, outputs = [], [], []
    feeds: dict[str, np.ndarray] = {}
    for number, (inner, outer) in enumerate(widths):
        source = f"x{inner}"
        size = (*shape.leading, inner, *shape.trailing)
        feeds.setdefault(source, random.standard_normal(size, dtype=np.float32))
        attributes = dict(shape.attributes)
        groups = inner if shape.depthwise else shape.groups
        if shape.operator == "MatMul":
            weight = (inner, outer)
        else:
            attributes["group"] = groups
            first, second = (inner, outer) if shape.operator == "ConvTranspose" else (outer, inner)
            weight = (first, second // groups, *attributes["kernel_shape"])
        values = random.standard_normal(weight, dtype=np.float32)
        weights.append(numpy_helper.from_array(values, f"w{number}"))
        nodes.append(
            helper.make_node(
                shape.operator, [source, f"w{number}"], [f"layer{number}"], name=f"layer{number}", **attributes
            )
        )
        outputs.append(helper.make_tensor_value_info(f"layer{number}", TensorProto.FLOAT, None))
    values_in = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in feeds.items()]
    graph = helper.make_graph(nodes, "layers", values_in, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return model.SerializeToString(), feeds


def axis_length(parameter: str, axis: int, size: int, groups: Sequence[PruneGroup]) -> AxisSize:
    """The length of the channel axis of a parameter as a function of the units kept in each group."""
    terms = []
    moving = 0
    for group in groups:
        count = sum(
            len(member.positions) for member in group.members if (member.parameter, member.axis) == (parameter, axis)
        )
        if count:
            moving += count
            terms.append((group.index, count / group.units))
    return AxisSize(float(size - moving), tuple(terms))


def layer_table(
    name: str,
    shape: LayerShape,
    weight: str,
    axes: tuple[int, int],
    widths: tuple[int, int],
    groups: Sequence[PruneGroup],
    meter: LatencyMeter,
) -> LayerTable:
    """Measured times of a layer.

    Args:
        name: the layer's name.
        shape: what its time depends on but for the widths.
        weight: name of its weight.
        axes: input and output axis of the weight, as members of groups name them.
        widths: input and output channels.
        groups: of the analysis.
        meter: keeps the measurements.
    """
    input_axis, output_axis = axes
    if shape.depthwise:
        length = axis_length(weight, output_axis, widths[1], groups)
        points = grid(widths[1], most=meter.points)
        times = meter.table(shape, points, points)
        lookup = interpolator(points, [1], times)
        return LayerTable(name, length, AxisSize(1.0), lookup)
    inner = axis_length(weight, input_axis, widths[0], groups)
    outer = axis_length(weight, output_axis, widths[1], groups)
    rows, columns = (
        # Widths of a grouped convolution are multiples of its groups.
        sorted({max(1, point // shape.groups) * shape.groups for point in grid(width, most=meter.points)})
        if length.terms
        else [width]
        for length, width in ((inner, widths[0]), (outer, widths[1]))
    )
    return LayerTable(name, inner, outer, interpolator(rows, columns, meter.table(shape, rows, columns)))
