"""Cost models: what a search spends. Operations, parameters, memory by formula; latency by measurement."""

from __future__ import annotations

from collections.abc import Iterable

from openwork.errors import ConfigError, nearest
from openwork.graph.groups import CostTerm
from openwork.search.cost._base import CostModel, CostState
from openwork.search.cost._latency import LatencyCost, LayerTable
from openwork.search.cost._polynomial import ActivationMemory, BitOps, Macs, Params, PolynomialCost

__all__ = [
    "ActivationMemory",
    "BitOps",
    "CostModel",
    "CostState",
    "LatencyCost",
    "LayerTable",
    "Macs",
    "Params",
    "PolynomialCost",
    "from_terms",
    "names",
]

_BY_TERMS: dict[str, type[PolynomialCost]] = {model.name: model for model in (ActivationMemory, BitOps, Macs, Params)}


def names() -> list[str]:
    """Names that the field ``cost`` takes."""
    return sorted([*_BY_TERMS, LatencyCost.name])


def from_terms(name: str, terms: Iterable[CostTerm]) -> PolynomialCost:
    """The cost model of that name over the terms of an analysis.

    Raises:
        ConfigError: the name is unknown, or names a model (latency) that terms alone cannot make.
    """
    if name not in _BY_TERMS:
        raise ConfigError(f"cost {name!r} is unknown; {nearest(name, _BY_TERMS)}")
    return _BY_TERMS[name](terms)
