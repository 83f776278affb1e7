"""What was found, layer by layer: as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from onnx import ModelProto, TensorProto

from openwork.convert.detect import Detection
from openwork.convert.layer import Layer
from openwork.onnx.functions import COMPRESSED
from openwork.onnx.modelfile import tensor_bits, tensor_type_name
from openwork.onnx.weights import NotConstant, whole_attribute

__all__ = ["LayerReport", "Report", "build_report", "render"]

_ASCEND_SMALLEST_CIN = 4
_TENSORRT_PAYS_FROM = 256
_MOST_NAMES = 20


@dataclass
class LayerReport:
    """One operator.

    Attributes:
        name: the node's name, or its first output.
        operator: its type.
        compressed_operator: the type of its compressed twin; None when it stays dense.
        where: the body or function it is in; empty for the main graph.
        weight: name of the stored tensor; None when the weight is no constant.
        weight_in: where that is defined: a body or function; empty for the main graph.
        type: element type of the stored tensor.
        shape: shape of the weight as the operator sees it.
        axis: the axis of the input channels.
        zeros: share of zeros, or None when they were not counted.
        qualifies: every group of four has two non-zeros at most, and storing it so saves bytes.
        reason: why not.
        groups: number of groups of four.
        bad_groups: groups with more than two non-zeros.
        first_bad: position in the stored tensor of the first such group.
        bytes_before: bytes of the stored tensor.
        bytes_after: bytes after conversion; the same when it stays dense.
        shared_with: other layers that read the same stored weight (the first twenty).
        negative_zeros: signs of zeros had to be stored, too.
        targets: what each kind of hardware would do with the layer.
    """

    name: str
    operator: str
    compressed_operator: str | None
    where: str
    weight: str | None
    weight_in: str
    type: str | None
    shape: list[int]
    axis: int | None
    zeros: float | None
    qualifies: bool
    reason: str | None
    groups: int | None
    bad_groups: int | None
    first_bad: list[int] | None
    bytes_before: int
    bytes_after: int
    shared_with: list[str]
    negative_zeros: bool
    targets: dict[str, str]


@dataclass
class Report:
    """The whole answer; `as_json` is what is written to the file."""

    model: str
    framework: int
    opset: int
    layers: list[LayerReport]
    output: str | None = None
    sparsity: int = 1
    emit: str = "onnx"
    file_bytes_before: int = 0
    file_bytes_after: int | None = None
    files: list[str] = field(default_factory=list)

    @property
    def qualifying(self) -> int:
        return sum(layer.qualifies for layer in self.layers)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        data = asdict(self)
        data["summary"] = {
            "layers": len(self.layers),
            "qualifying": self.qualifying,
            "weight_bytes_before": _once(self.layers, "bytes_before"),
            "weight_bytes_after": _once(self.layers, "bytes_after"),
        }
        return data


def _once(layers: Sequence[LayerReport], name: str) -> int:
    """Sum over stored weights, each counted once."""
    seen: dict[tuple[str, str], int] = {}
    for layer in layers:
        if layer.weight is not None:
            seen[(layer.weight_in, layer.weight)] = getattr(layer, name)
    return sum(seen.values())


def build_report(detection: Detection, proto: ModelProto, /, **about: Any) -> Report:
    """Turn a detection into a report; `about` are the remaining fields of `Report`."""
    static = _is_static(proto)
    layers = [_layer(layer, detection, static) for layer in detection.layers]
    return Report(layers=layers, opset=detection.scopes[0].opset, **about)


def _is_static(model: ModelProto) -> bool:
    initial = {tensor.name for tensor in model.graph.initializer}
    for info in model.graph.input:
        if info.name in initial:
            continue
        if not info.type.tensor_type.HasField("shape"):
            return False
        if any(not dim.HasField("dim_value") or dim.dim_value <= 0 for dim in info.type.tensor_type.shape.dim):
            return False
    return True


def _layer(layer: Layer, detection: Detection, static: bool) -> LayerReport:
    pattern, source = layer.pattern, layer.source
    qualifies = layer.reason is None
    same = detection.weights.get(id(source.value), []) if source is not None else []
    return LayerReport(
        name=layer.name,
        operator=layer.node.op_type,
        compressed_operator=COMPRESSED[layer.node.op_type] if qualifies else None,
        where=layer.scope.where,
        weight=source.value.name if source is not None else None,
        weight_in=source.value.scope.where if source is not None else "",
        type=tensor_type_name(source.tensor.data_type) if source is not None else None,
        shape=list(layer.shape),
        axis=layer.axis if source is not None else None,
        zeros=pattern.zeros / max(1, pattern.size) if pattern is not None else None,
        qualifies=qualifies,
        reason=layer.reason,
        groups=pattern.groups if pattern is not None else None,
        bad_groups=pattern.bad_groups if pattern is not None else None,
        first_bad=list(pattern.first_bad) if pattern is not None and pattern.first_bad is not None else None,
        bytes_before=layer.dense_bytes,
        bytes_after=layer.packed_bytes if qualifies else layer.dense_bytes,
        shared_with=list(islice((other.name for other in same if other is not layer), _MOST_NAMES)),
        negative_zeros=bool(qualifies and pattern is not None and pattern.hidden_negative_zeros),
        targets=_targets(layer, static),
    )


def _targets(layer: Layer, static: bool) -> dict[str, str]:
    if layer.reason is not None:
        return {"ascend": "dense", "tensorrt": "dense", "cpu": "dense"}
    return {"ascend": _ascend(layer, static), "tensorrt": _tensorrt(layer), "cpu": _cpu(layer)}


def _groups(layer: Layer) -> int:
    try:
        return whole_attribute(layer.node, "group", 1)
    except NotConstant:
        return 1


def _ascend(layer: Layer, static: bool) -> str:
    assert layer.source is not None
    kind = layer.source.tensor.data_type
    if kind != TensorProto.INT8:
        return f"dense: {tensor_type_name(kind)} weight, only int8 is accelerated"
    if _groups(layer) != 1:
        return f"dense: {_groups(layer)} groups, only 1 is accelerated"
    if layer.shape[layer.axis] <= _ASCEND_SMALLEST_CIN:
        return f"dense: {layer.shape[layer.axis]} input channels, more than {_ASCEND_SMALLEST_CIN} are needed"
    if not static:
        return "dense: an input has a dynamic shape (give --input_shape)"
    return "compressed"


def _tensorrt(layer: Layer) -> str:
    kind = layer.node.op_type
    if kind not in ("Conv", "Gemm"):
        return f"dense: {kind} is not looked at (convolutions and Gemm are)"
    if layer.shape[layer.axis] < _TENSORRT_PAYS_FROM:
        return f"from the dense file: little gain below {_TENSORRT_PAYS_FROM} input channels"
    return "sparse from the dense file (--emit dense)"


def _cpu(layer: Layer) -> str:
    assert layer.source is not None
    if (tensor_bits(layer.source.tensor.data_type) or 8) <= 8 and layer.node.op_type != "Conv":
        return "dense after loading; a 2:4 kernel gains at batch 1 to 4 on large layers"
    return "dense after loading"


def render(report: Report) -> str:
    """The table for a terminal: one line per layer, reasons in full."""
    head = ("layer", "operator", "weight", "axis", "zeros", "before", "after", "result")
    rows = [head]
    for layer in report.layers:
        if layer.qualifies:
            result = f"2:4 -> {layer.compressed_operator}"
            if layer.negative_zeros:
                result += " (with signs of zeros)"
            if layer.shared_with:
                result += f" (weight shared with {', '.join(layer.shared_with[:3])})"
        else:
            result = f"dense: {layer.reason}"
        where = f"{layer.where}: " if layer.where else ""
        shape = "x".join(map(str, layer.shape)) + f" {layer.type}" if layer.weight is not None else "-"
        rows.append(
            (
                where + layer.name,
                layer.operator,
                shape,
                "-" if layer.axis is None else str(layer.axis),
                "-" if layer.zeros is None else f"{100 * layer.zeros:.1f}%",
                f"{layer.bytes_before:,}",
                f"{layer.bytes_after:,}",
                result,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in (3, 4, 5, 6) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    lines.append("")
    lines.append(_summary(report))
    return "\n".join(_printable(line) for line in lines)


def _printable(line: str) -> str:
    """Names come from the file: nothing in them may steer the terminal."""
    return "".join(character if character.isprintable() else "?" for character in line)


def _summary(report: Report) -> str:
    before, after = _once(report.layers, "bytes_before"), _once(report.layers, "bytes_after")
    text = f"{report.qualifying} of {len(report.layers)} layers qualify for 2:4; weights {before:,} bytes"
    if report.qualifying:
        text += f" -> {after:,} ({100 * after / max(1, before):.1f}%)"
    if report.file_bytes_after is not None:
        text += f"; files {report.file_bytes_before:,} -> {report.file_bytes_after:,} bytes"
    return text
