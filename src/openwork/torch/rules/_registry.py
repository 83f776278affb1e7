"""How a front-end rule is written and found.

A rule maps one operator call to the structural operators of `openwork.graph.operators`. Besides labels it may
state what a call's size arguments must be after a removal (`expect`), and the factors of its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from openwork.graph.costs import Cost
from openwork.graph.labels import LabelMap, LabelStore
from openwork.torch.watch import Call

__all__ = ["RULES", "Context", "Cost", "Rule", "find_rule", "rule"]


class Maps(Protocol):
    """Where a rule gets the label maps of tensors."""

    def map_of(self, tensor: torch.Tensor) -> LabelMap: ...

    def parameter_of(self, tensor: torch.Tensor) -> str | None: ...


@dataclass(eq=False)
class Context:
    """What a rule reads and writes for one call."""

    store: LabelStore
    call: Call
    shapes: list[tuple[int, ...]]
    source: Maps
    cost: Cost | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.shapes[0]

    def get(self, name: str, default: Any = None) -> Any:
        return self.call.get(name, default)

    def map(self, name: str) -> LabelMap:
        """Map of a tensor argument."""
        return self.source.map_of(self.call.get(name))

    def optional(self, name: str) -> LabelMap | None:
        tensor = self.call.get(name)
        return self.source.map_of(tensor) if isinstance(tensor, torch.Tensor) else None

    def maps(self, name: str) -> list[LabelMap]:
        return [self.source.map_of(tensor) for tensor in self.call.get(name)]

    @property
    def all_maps(self) -> list[LabelMap]:
        return [self.source.map_of(tensor) for tensor in self.call.tensors]

    def axis(self, value: int, rank: int) -> int:
        """A non-negative axis."""
        return value + rank if value < 0 else value


Result = LabelMap | Sequence[LabelMap | None]
Sizes = Callable[[Call, list[tuple[int, ...]]], list[int]]
Expected = Callable[[Any, list[tuple[int, ...]], list[tuple[int, ...]], np.ndarray], list[int]]


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule for some operators.

    Attributes:
        label: reads the context, returns the map of the result, or of each result.
        sizes: for operators with size arguments: (call, input shapes) -> the sizes as a plain list that
            corresponds one to one to what `expected` gives.
        expected: (record of the call, predicted input shapes, predicted output shapes, dead labels) -> the
            list expected.
    """

    label: Callable[[Context], Result]
    sizes: Sizes | None = None
    expected: Expected | None = None


@dataclass
class _Rules:
    by_name: dict[str, Rule] = field(default_factory=dict)


RULES = _Rules()


def rule(
    *names: str,
    sizes: Sizes | None = None,
    expected: Expected | None = None,
) -> Callable[[Callable[[Context], Result]], Callable[[Context], Result]]:
    """Register a rule for operators: full names (``torch.matmul``) or ATen packets (``aten.add``)."""

    def register(function: Callable[[Context], Result]) -> Callable[[Context], Result]:
        for name in names:
            RULES.by_name[name] = Rule(function, sizes, expected)
        return function

    return register


def find_rule(call: Call) -> Rule | None:
    """The rule of a call: by overload, then by packet, in-place variants like their plain form."""
    found = RULES.by_name.get(call.name)
    if found is None and call.name.count(".") == 2:
        packet = call.name.rpartition(".")[0]
        found = RULES.by_name.get(packet) or RULES.by_name.get(packet.rstrip("_"))
        RULES.by_name[call.name] = found  # type: ignore[assignment]
    return found
