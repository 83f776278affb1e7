"""One operator that could have a compressed twin, and all that is known about its weight."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from openwork.onnx.functions import Layout
from openwork.onnx.scopes import Scope, Value
from openwork.onnx.weights import PackedView, Source
from openwork.sparsity.pack24 import Pattern24

__all__ = ["Handed", "Layer"]


@dataclass(frozen=True, eq=False)
class Handed:
    """A weight that is handed to a local function.

    Attributes:
        formal: the input of the function.
        call: the node that calls it.
        slot: which input of that node is the weight.
        scope: where that node is.
    """

    formal: Value
    call: NodeProto
    slot: int
    scope: Scope


@dataclass(eq=False)
class Layer:
    """One operator that could have a compressed twin.

    Attributes:
        node: the operator.
        scope: where it is.
        slot: its input that holds the weight; None when neither does.
        source: the stored tensor behind it.
        shape: the weight's shape as the operator sees it.
        axis: the axis of the input channels there.
        view: where the groups of four lie in the stored tensor.
        zero_point: value that stands for zero.
        pattern: what was counted; None when it was not looked at.
        handed: how the weight comes into the local function around the operator, if it does.
        reason: why the layer stays dense; None when it qualifies.
        dense_bytes: bytes of the stored tensor.
        packed_bytes: bytes of values and index, if it was looked at.
    """

    node: NodeProto
    scope: Scope
    slot: int | None = None
    source: Source | None = None
    shape: tuple[int, ...] = ()
    axis: int = 0
    view: PackedView | None = None
    zero_point: int = 0
    pattern: Pattern24 | None = None
    handed: Handed | None = None
    reason: str | None = None
    dense_bytes: int = 0
    packed_bytes: int = 0

    @property
    def name(self) -> str:
        return self.node.name or (self.node.output[0] if self.node.output else "")

    @property
    def layout(self) -> Layout:
        assert self.source is not None
        assert self.view is not None
        assert self.pattern is not None
        return Layout(
            data_type=self.source.tensor.data_type,
            dims=self.source.dims,
            view=self.view.shape,
            axis=self.view.axis,
            zero_point=self.zero_point,
            signs=self.pattern.hidden_negative_zeros,
        )
