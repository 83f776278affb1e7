"""Weights that several operators read: packed once if all can read them so, else dense for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from openwork.convert.layer import Layer
from openwork.onnx.scopes import Value, label

__all__ = ["settle", "store_signs_alike"]


def settle(layers: list[Layer]) -> dict[int, list[Layer]]:
    """Give a reason to layers whose weight is also read in a way that needs it dense.

    Returns:
        The layers without a reason by identity of the stored weight.
    """
    while True:
        changed = False
        for same in _by_formal(layers):
            changed |= _refuse(same, _unequal(same))
        weights = _by_weight(layer for layer in layers if layer.reason is None)
        for same in weights.values():
            changed |= _refuse(same, _shared(same))
        if not changed:
            return weights


def store_signs_alike(layers: list[Layer]) -> None:
    """Where one of several layers that share a weight, or a function, needs signs of zeros, all store them."""
    groups = [*_by_weight(layers).values(), *_by_formal(layers)]
    changed = True
    while changed:
        changed = False
        for same in groups:
            needed = any(layer.pattern is not None and layer.pattern.hidden_negative_zeros for layer in same)
            for layer in same if needed else ():
                if layer.pattern is not None and not layer.pattern.hidden_negative_zeros:
                    layer.pattern = replace(layer.pattern, hidden_negative_zeros=True)
                    changed = True


def _by_weight(layers: Iterable[Layer]) -> dict[int, list[Layer]]:
    weights: dict[int, list[Layer]] = defaultdict(list)
    for layer in layers:
        assert layer.source is not None
        weights[id(layer.source.value)].append(layer)
    return dict(weights)


def _by_formal(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Layers that read the same input of a local function, at one call of it or another."""
    formals: dict[int, list[Layer]] = defaultdict(list)
    operators: dict[int, int] = {}
    waiting: list[Layer] = []
    for layer in layers:
        if layer.handed is not None:
            formals[id(layer.handed.formal)].append(layer)
            operators[id(layer.node)] = id(layer.handed.formal)
        elif layer.reason is not None:
            waiting.append(layer)
    for layer in waiting:
        # A call that hands over no constant: the operator must stay as it is for all calls.
        if id(layer.node) in operators:
            formals[operators[id(layer.node)]].append(layer)
    return list(formals.values())


def _refuse(layers: list[Layer], reason: str | None) -> bool:
    """Give all layers without a reason this one; whether any had none."""
    if reason is None:
        return False
    changed = False
    for layer in layers:
        if layer.reason is None:
            layer.reason = reason
            changed = True
    return changed


def _unequal(layers: list[Layer]) -> str | None:
    """Why calls of one function cannot all hand over a compressed weight."""
    for layer in layers:
        if layer.reason is not None:
            where = f" ({label(layer.handed.call)})" if layer.handed is not None else ""
            return f"shared: another call of the function{where} needs it dense: {layer.reason}"[:300]
    first = layers[0]
    for other in layers[1:]:
        assert first.source is not None
        assert other.source is not None
        kinds = [
            (layer.source.tensor.data_type, layer.source.dims, layer.view, layer.zero_point)  # type: ignore[union-attr]
            for layer in (first, other)
        ]
        if kinds[0] != kinds[1]:
            return "shared: calls of the function hand over weights of different shapes or types"
    return None


def _shared(layers: list[Layer]) -> str | None:
    first = layers[0]
    for other in layers[1:]:
        if (other.view, other.zero_point) != (first.view, first.zero_point):
            return f"shared: {label(first.node)} and {label(other.node)} need it packed along different axes"
    # Everything that reads the stored tensor, or what a node on the way makes of it, must be one of the layers.
    allowed = {(id(layer.node), layer.slot) for layer in layers}
    values: dict[int, Value] = {}
    for layer in layers:
        assert layer.source is not None
        values[id(layer.source.value)] = layer.source.value
        if layer.handed is not None:
            values[id(layer.handed.formal)] = layer.handed.formal
            allowed.add((id(layer.handed.call), layer.handed.slot))
        for step in layer.source.steps:
            values[id(step.value)] = step.value
            allowed.add((id(step.node), 0))
    for value in values.values():
        for reading in value.readings:
            if reading.node is None:
                return f"shared: {value.name!r} is also an output of the graph"
            if (id(reading.node), reading.slot) not in allowed:
                return f"shared: {value.name!r} is also read by {label(reading.node)}"
    return None
