"""Channel pruning in a record: which positions of which layers went, group by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from openwork.errors import RecordError
from openwork.record.attributes import AttributeValue, read_attributes, same_attributes, set_attribute

__all__ = ["ChannelPruneRecord", "PruneNode"]

IntArray = npt.NDArray[np.int64]
_KNOWN = ("type", "begin", "end", "group", "prune_group", "prune_index")


@dataclass(frozen=True, eq=False)
class PruneNode:
    """One layer in a group.

    Attributes:
        name: the layer's name (module path), or that of an operator that is no layer (``/Concat``).
        type: ONNX operator type: Conv, Gemm, MatMul, ConvTranspose, BatchNormalization, Add, Concat, ...
        begin, end: the range of the layer's channels that belongs to the group; outputs for a producer,
            inputs for a consumer.
        prune_index: int64, removed positions, ascending, absolute inside the layer, in ``begin..end-1``.
        group: groups of the convolution, if it says.
        prune_group: number of blocks that each lose the same number, if it says.
        extra: all other attributes, in their order; readers that do not know them pass over them.
    """

    name: str
    type: str
    begin: int
    end: int
    prune_index: IntArray
    group: int | None = None
    prune_group: int | None = None
    extra: Mapping[str, AttributeValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positions = np.asarray(self.prune_index, dtype=np.int64).reshape(-1)
        object.__setattr__(self, "prune_index", np.sort(positions))
        self._check()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PruneNode):
            return NotImplemented
        return (
            (self.name, self.type, self.begin, self.end, self.group, self.prune_group)
            == (other.name, other.type, other.begin, other.end, other.group, other.prune_group)
            and np.array_equal(self.prune_index, other.prune_index)
            and same_attributes(self.extra, other.extra)
        )

    @property
    def kept(self) -> int:
        """Channels of the range that stay."""
        return self.end - self.begin - len(self.prune_index)

    def with_extra(self, extra: Mapping[str, AttributeValue]) -> PruneNode:
        """A copy with further attributes of our own."""
        return replace(self, extra={**self.extra, **extra})

    def _check(self) -> None:
        where = f"{self.name!r}"
        if not self.name:
            raise RecordError("a node has no name")
        if not 0 <= self.begin < self.end:
            raise RecordError(f"{where}: begin is {self.begin} and end is {self.end}; 0 <= begin < end is needed")
        for name, value in (("group", self.group), ("prune_group", self.prune_group)):
            if value is not None and value < 1:
                raise RecordError(f"{where}: {name} is {value}; it must be at least 1")
        index = self.prune_index
        if not len(index):
            return
        if index[0] < 0:
            raise RecordError(f"{where}: prune_index holds {index[0]}; positions are at least 0")
        for position in (index[0], index[-1]):
            if not self.begin <= position < self.end:
                raise RecordError(f"{where}: prune_index holds {position}; allowed: {self.begin} to {self.end - 1}")
        repeated = index[1:][index[1:] == index[:-1]]
        if len(repeated):
            raise RecordError(f"{where}: prune_index holds {repeated[0]} twice")


@dataclass(frozen=True)
class ChannelPruneRecord:
    """The layers that one group of channels was removed from.

    Attributes:
        producers: layers that make the channels.
        consumers: layers that read or carry them; batch norms and depthwise convolutions are among them.
    """

    producers: tuple[PruneNode, ...]
    consumers: tuple[PruneNode, ...] = ()

    def __post_init__(self) -> None:
        if not self.producers:
            raise RecordError("a prune_record has no producer; at least one is needed")
        for node in self.producers:
            if node.kept < 1:
                raise RecordError(
                    f"{node.name!r}: prune_index holds all channels from {node.begin} to {node.end - 1}; "
                    "at least one must stay"
                )

    @property
    def nodes(self) -> tuple[PruneNode, ...]:
        """Producers, then consumers."""
        return self.producers + self.consumers

    def with_extra(self, extra: Mapping[str, AttributeValue]) -> ChannelPruneRecord:
        """A copy whose first producer has further attributes of our own."""
        first, *rest = self.producers
        return replace(self, producers=(first.with_extra(extra), *rest))


def fill_channels(proto: Any, record: ChannelPruneRecord) -> None:
    """Write into a ``PruneRecord`` message; attributes in the order that AMCT writes."""
    for nodes, target in ((record.producers, proto.producer), (record.consumers, proto.consumer)):
        for node in nodes:
            item = target.add(name=node.name)
            values = {name: getattr(node, name) for name in _KNOWN}
            for name, value in {**values, **node.extra}.items():
                if value is not None:
                    set_attribute(item, name, value)


def read_channels(proto: Any, where: str) -> ChannelPruneRecord:
    """Read from a ``PruneRecord`` message.

    Raises:
        RecordError: an attribute is missing or of the wrong type, or positions are impossible.
    """
    producers = tuple(_read_node(node, f"{where}.producer[{i}]") for i, node in enumerate(proto.producer))
    consumers = tuple(_read_node(node, f"{where}.consumer[{i}]") for i, node in enumerate(proto.consumer))
    try:
        return ChannelPruneRecord(producers, consumers)
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from error


def _read_node(proto: Any, where: str) -> PruneNode:
    attributes = read_attributes(proto, f"{where} {proto.name!r}")

    def take(name: str, kind: type, required: bool = True) -> Any:
        value = attributes.pop(name, None)
        if value is None:
            if required:
                raise RecordError(f"{where} {proto.name!r}: attribute {name!r} is missing")
            return None
        if not isinstance(value, kind) or (kind is np.ndarray and value.dtype.kind != "i"):  # type: ignore[union-attr]
            wanted = {str: "STRING", int: "INT", np.ndarray: "INTS"}[kind]
            raise RecordError(f"{where} {proto.name!r}: attribute {name!r} has the wrong type; {wanted} is needed")
        return value

    try:
        return PruneNode(
            name=proto.name,
            type=take("type", str),
            begin=take("begin", int),
            end=take("end", int),
            group=take("group", int, required=False),
            prune_group=take("prune_group", int, required=False),
            prune_index=take("prune_index", np.ndarray),
            extra=attributes,
        )
    except RecordError as error:
        if str(error).startswith(where):
            raise
        raise RecordError(f"{where}: {error}") from error
