"""How a rule of the TensorFlow front end is written and found.

A rule maps one operator to the structural operators of `openwork.graph.operators`. It may say which inputs are
values (axes, sizes, paddings) rather than tensors, and what these must be after a removal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from openwork.graph.costs import Cost
from openwork.graph.labels import LabelMap, LabelStore
from openwork.graph.sizes import surviving_shape

__all__ = ["RULES", "Context", "NotKnown", "Record", "Result", "Rule", "WeightUse", "attribute", "rule"]


class NotKnown(Exception):
    """A value that a rule needs depends on data; the text says which."""


def attribute(node: Any, name: str, default: Any = None) -> Any:
    """An attribute of a node as a Python value."""
    if name not in node.attr:
        return default
    value = node.attr[name]
    kind = value.WhichOneof("value")
    if kind == "s":
        return value.s.decode()
    if kind == "list":
        return list(value.list.i) or [item.decode() for item in value.list.s]
    return getattr(value, kind) if kind in ("i", "f", "b", "type") else value


@dataclass(frozen=True)
class WeightUse:
    """How a layer reads its weight: input number, axes of the outputs and inputs, groups."""

    place: int
    out_axis: int
    in_axis: int
    groups: int = 1


@dataclass(eq=False)
class Context:
    """What a rule reads and writes for one operator.

    Attributes:
        store: the labels.
        node: the NodeDef.
        inputs: label maps of its data inputs.
        shapes: shapes of its outputs.
        values: values of those inputs that are known, by input number.
        parameters: names of those inputs that are weights, by input number.
        cost: set by the rule: its multiply-accumulates.
        weight: set by the rule: how it reads its weight.
    """

    store: LabelStore
    node: Any
    inputs: list[LabelMap]
    shapes: list[tuple[int, ...]]
    values: dict[int, np.ndarray]
    parameters: dict[int, str]
    cost: Cost | None = None
    weight: WeightUse | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first output."""
        return self.shapes[0]

    def attr(self, name: str, default: Any = None) -> Any:
        return attribute(self.node, name, default)

    def value(self, place: int, what: str) -> np.ndarray:
        """The value of an input; counted from the end if negative."""
        place %= len(self.inputs)
        if place not in self.values:
            raise NotKnown(f"{what} depends on data")
        return self.values[place]

    def axis(self, place: int, rank: int, what: str = "its axis") -> int:
        """An axis given by an input, not negative."""
        return int(self.value(place, what)) % max(1, rank)

    @property
    def channel(self) -> int:
        """Channel axis of the first input as data_format says."""
        return channel_axis(self.node, len(self.inputs[0].shape))


def channel_axis(node: Any, rank: int) -> int:
    """Channel axis of a tensor of this rank in the node's data_format."""
    return 1 if attribute(node, "data_format", "NHWC").startswith("NC") else rank - 1


Result = LabelMap | Sequence[LabelMap | None]
Expected = Callable[["Record", np.ndarray], dict[int, np.ndarray]]


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule for some operators.

    Attributes:
        label: reads the context, returns the map of the output, or of each output.
        values: inputs that are values, by number; negative ones count from the end.
        expected: (record, dead labels) -> what these inputs must be after the removal, by number.
        makes: it makes labels of its own, also where no input has any.
    """

    label: Callable[[Context], Result]
    values: tuple[int, ...] = ()
    expected: Expected | None = None
    makes: bool = False


@dataclass(eq=False)
class Record:
    """One operator of the labelled graph."""

    node: Any
    inputs: list[LabelMap]
    outputs: list[LabelMap]
    values: dict[int, np.ndarray]
    rule: Rule | None
    cost: Cost | None = None
    weight: WeightUse | None = None
    parameters: dict[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.node.op)

    @property
    def module(self) -> str:
        return str(self.node.name)

    def new_shape(self, index: int, dead: np.ndarray) -> tuple[int, ...]:
        """Shape of an output after the removal."""
        return surviving_shape(self.outputs[index], dead)


RULES: dict[str, Rule] = {}


def rule(
    *names: str, values: tuple[int, ...] = (), expected: Expected | None = None, makes: bool = False
) -> Callable[[Callable[[Context], Result]], Callable[[Context], Result]]:
    """Register a rule for operator types."""

    def register(function: Callable[[Context], Result]) -> Callable[[Context], Result]:
        for name in names:
            RULES[name] = Rule(function, values, expected, makes)
        return function

    return register
