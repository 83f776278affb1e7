"""Costs that are sums of constant * product of axis lengths: operations, parameters, activations.

An axis length is affine in the units that groups keep, so the change of a term when one group changes is
(product of the untouched lengths) * (product of the new lengths - product of the old ones).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from openwork.graph.groups import AxisSize, CostTerm
from openwork.search.cost._base import CostModel, CostState

__all__ = ["ActivationMemory", "BitOps", "Macs", "Params", "PolynomialCost"]

# One term as one group sees it: constant, lengths it leaves alone, lengths it changes with their slope.
_View = tuple[float, tuple[int, ...], tuple[tuple[int, float], ...]]


class PolynomialCost(CostModel):
    """Sum of cost terms, each with a weight.

    Args:
        terms: the analysis' terms; those whose kind is not `kind` are left out.
    """

    kind: ClassVar[str]

    def __init__(self, terms: Iterable[CostTerm]) -> None:
        self.terms = [(term, self.weight(term)) for term in terms if term.kind == self.kind]
        ids: dict[AxisSize, int] = {}
        self.products: list[tuple[float, tuple[int, ...]]] = []
        for term, weight in self.terms:
            axes = tuple(ids.setdefault(axis, len(ids)) for axis in term.axes)
            self.products.append((term.constant * weight, axes))
        self.axes = list(ids)
        self.views: dict[int, list[_View]] = {}
        for constant, axes in self.products:
            groups = {group for axis in axes for group, _ in self.axes[axis].terms}
            for group in groups:
                slopes = [(axis, sum(c for g, c in self.axes[axis].terms if g == group)) for axis in axes]
                others = tuple(axis for axis, slope in slopes if not slope)
                own = tuple((axis, slope) for axis, slope in slopes if slope)
                self.views.setdefault(group, []).append((constant, others, own))
        self.slopes: dict[int, list[tuple[int, float]]] = {}
        for number, axis_size in enumerate(self.axes):
            for group, coefficient in axis_size.terms:
                self.slopes.setdefault(group, []).append((number, coefficient))

    def weight(self, term: CostTerm) -> float:
        """Factor of a term; 1 unless a subclass knows better."""
        return 1.0

    def state(self, kept: Sequence[int]) -> CostState:
        return _PolynomialState(self, kept)

    def by_layer(self, kept: Sequence[int]) -> dict[str, float]:
        costs: dict[str, float] = {}
        for term, weight in self.terms:
            name = term.name.rpartition(".")[0] if term.kind == "params" else term.name
            costs[name] = costs.get(name, 0.0) + weight * term.value(kept)  # type: ignore[arg-type]
        return costs


class _PolynomialState(CostState):
    def __init__(self, model: PolynomialCost, kept: Sequence[int]) -> None:
        self.kept = [int(units) for units in kept]
        self._model = model
        self._lengths = [axis.length(self.kept) for axis in model.axes]  # type: ignore[arg-type]
        self.total = self._sum()

    def _sum(self) -> float:
        total = 0.0
        for constant, axes in self._model.products:
            for axis in axes:
                constant *= self._lengths[axis]
            total += constant
        return total

    def gain(self, group: int, units: int) -> float:
        change = units - self.kept[group]
        lengths = self._lengths
        result = 0.0
        for constant, others, own in self._model.views.get(group, ()):
            for axis in others:
                constant *= lengths[axis]
            before = after = 1.0
            for axis, slope in own:
                length = lengths[axis]
                before *= length
                after *= length + slope * change
            result += constant * (before - after)
        return result

    def apply(self, group: int, units: int) -> None:
        self.total -= self.gain(group, units)
        change = units - self.kept[group]
        self.kept[group] = units
        for axis, slope in self._model.slopes.get(group, ()):
            self._lengths[axis] += slope * change


class Macs(PolynomialCost):
    """Multiply-accumulate operations of all contractions of the traced run."""

    name: ClassVar[str] = "macs"
    unit: ClassVar[str] = "MACs"
    kind: ClassVar[str] = "macs"


class BitOps(PolynomialCost):
    """MACs times weight bits times activation bits.

    Args:
        terms: the analysis' terms.
        bits: module path -> (weight bits, activation bits); 32 and 32 where it says nothing.
    """

    name: ClassVar[str] = "bitops"
    unit: ClassVar[str] = "bit operations"
    kind: ClassVar[str] = "macs"

    def __init__(self, terms: Iterable[CostTerm], bits: Mapping[str, tuple[int, int]] | None = None) -> None:
        self.bits = dict(bits or {})
        super().__init__(terms)

    def weight(self, term: CostTerm) -> float:
        weight_bits, activation_bits = self.bits.get(term.name, (32, 32))
        return float(weight_bits * activation_bits)


class Params(PolynomialCost):
    """Number of parameters."""

    name: ClassVar[str] = "params"
    unit: ClassVar[str] = "parameters"
    kind: ClassVar[str] = "params"


class ActivationMemory(PolynomialCost):
    """Bytes of all operators' results, 4 for each element: what a training step holds, not the peak."""

    name: ClassVar[str] = "activation_memory"
    unit: ClassVar[str] = "bytes"
    kind: ClassVar[str] = "activations"

    def weight(self, term: CostTerm) -> float:
        return 4.0
