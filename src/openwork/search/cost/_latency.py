"""Latency: the sum over layers of a measured time, looked up at the layer's input and output width.

Runtimes compute channels in vector-wide blocks, so the time of a layer is a staircase: 17 channels cost as
much as 32. A table therefore holds measurements at multiples of the block and just above them, and a width
in between is interpolated inside its own step only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from openwork.graph.groups import AxisSize
from openwork.search.cost._base import CostModel, CostState

__all__ = ["LatencyCost", "LayerTable", "StairTable", "grid", "interpolator"]


def grid(width: int, block: int = 16, most: int = 5) -> list[int]:
    """Widths to measure for a full width: 1, up to `most` block edges, just above them, the end.

    Returns:
        ascending, without repeats, all in ``range(1, width + 1)``.
    """
    edges = list(range(block, width + 1, block))
    if len(edges) > most:
        edges = [edges[round(i * (len(edges) - 1) / (most - 1))] for i in range(most)]
    points = {1, (width - 1) // block * block + 1, width}
    for edge in edges:
        points.add(edge)
        if edge + 1 < width:
            points.add(edge + 1)
    return sorted(points)


@dataclass(frozen=True)
class LayerTable:
    """Measured times of one layer.

    Attributes:
        name: module path.
        input: length of the input channel axis as a function of the kept units.
        output: length of the output channel axis.
        time: seconds at (input width, output width).
        groups: widths that change together (all groups that either axis depends on).
    """

    name: str
    input: AxisSize
    output: AxisSize
    time: Callable[[int, int], float]
    groups: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        together = {group for axis in (self.input, self.output) for group, _ in axis.terms}
        object.__setattr__(self, "groups", tuple(sorted(together)))

    def value(self, kept: Sequence[int]) -> float:
        """Seconds for the given widths."""
        lengths = (round(axis.length(kept)) for axis in (self.input, self.output))  # type: ignore[arg-type]
        return self.time(*lengths)

    def values(self, kept: Sequence[int], group: int, units: np.ndarray) -> np.ndarray:
        """Seconds when `group` keeps each of `units` and the others what `kept` says."""
        lengths = []
        for axis in (self.input, self.output):
            slope = sum(coefficient for index, coefficient in axis.terms if index == group)
            rest = axis.length(kept) - slope * kept[group]  # type: ignore[arg-type]
            lengths.append(np.rint(rest + slope * units).astype(np.int64))
        if isinstance(self.time, StairTable):
            return self.time.many(*lengths)
        pairs = np.broadcast(*lengths)
        return np.array([self.time(int(i), int(o)) for i, o in pairs], dtype=np.float64)


@dataclass(frozen=True, eq=False)
class StairTable:
    """Seconds for every pair of widths.

    Attributes:
        seconds: float64 [input width, output width], from 0 up to the full widths.
    """

    seconds: np.ndarray

    def __call__(self, input_width: int, output_width: int) -> float:
        return float(self.many(input_width, output_width))

    def many(self, inputs: Any, outputs: Any) -> np.ndarray:
        """Seconds for arrays of widths, which broadcast; a width beyond the table is its last."""
        rows, columns = self.seconds.shape
        return np.asarray(self.seconds[np.minimum(inputs, rows - 1), np.minimum(outputs, columns - 1)])


def interpolator(inputs: Sequence[int], outputs: Sequence[int], times: np.ndarray, block: int = 16) -> StairTable:
    """A staircase-aware lookup in a table of times [inputs, outputs] measured on `grid` widths.

    Times are first made non-decreasing along both axes (a wider layer is never faster; what remains is
    noise). A width strictly inside a step lies between the step's first width and its upper edge.
    """
    clean = np.maximum.accumulate(np.maximum.accumulate(np.asarray(times, dtype=np.float64), axis=0), axis=1)
    rows = [_weights(width, inputs, block) for width in range(inputs[-1] + 1)]
    columns = [_weights(width, outputs, block) for width in range(outputs[-1] + 1)]
    left = np.stack(rows)
    right = np.stack(columns)
    table = np.maximum.accumulate(np.maximum.accumulate(left @ clean @ right.T, axis=0), axis=1)
    return StairTable(table)


def _weights(width: int, points: Sequence[int], block: int) -> np.ndarray:
    """Interpolation weights [points] of one width. Edges and just-above widths are two separate curves."""
    result = np.zeros(len(points))
    if width in points:
        result[list(points).index(width)] = 1.0
        return result
    if width < points[0]:
        result[0] = 1.0
        return result
    edge = min(-(-width // block) * block, points[-1])  # upper edge of the step
    first = (width - 1) // block * block + 1  # first width of the step
    # Measured widths of a grouped convolution need not meet the edges; then they say nothing about steps.
    stairs = points[0] == 1 and all(point % block <= 1 for point in points[1:-1])
    if stairs and first > points[0] and edge > first:
        share = (width - first) / (edge - first)
        return (1 - share) * _curve(first, points, block, 1) + share * _curve(edge, points, block, 0)
    return _curve(width, points, block, None)


def _curve(width: int, points: Sequence[int], block: int, rest: int | None) -> np.ndarray:
    """Linear interpolation among those points that leave `rest` modulo the block; None: among all.

    The last point counts as an edge, be it one or not.
    """
    result = np.zeros(len(points))
    chosen = [
        number
        for number, point in enumerate(points)
        if rest is None or point % block == rest or (rest == 0 and number == len(points) - 1)
    ]
    xs = [points[number] for number in chosen]
    right = int(np.searchsorted(xs, width))
    if right < len(xs) and xs[right] == width:
        result[chosen[right]] = 1.0
    elif right == 0 or right == len(xs):
        result[chosen[min(right, len(xs) - 1)]] = 1.0
    else:
        share = (width - xs[right - 1]) / (xs[right] - xs[right - 1])
        result[chosen[right - 1]], result[chosen[right]] = 1 - share, share
    return result


class LatencyCost(CostModel):
    """Sum of the layers' measured times plus a fixed rest.

    Args:
        layers: one table a layer, in the order in which the model runs them.
        fixed: seconds of everything that no group changes.
    """

    name: ClassVar[str] = "latency"
    unit: ClassVar[str] = "s"
    staircase: ClassVar[bool] = True

    def __init__(self, layers: Sequence[LayerTable], fixed: float = 0.0) -> None:
        self.layers = list(layers)
        self.fixed = fixed
        self.touching: dict[int, list[int]] = {}
        for number, layer in enumerate(self.layers):
            for group in layer.groups:
                self.touching.setdefault(group, []).append(number)

    def state(self, kept: Sequence[int]) -> CostState:
        return _LatencyState(self, kept)

    def by_layer(self, kept: Sequence[int]) -> dict[str, float]:
        return {layer.name: layer.value(kept) for layer in self.layers}


class _LatencyState(CostState):
    def __init__(self, model: LatencyCost, kept: Sequence[int]) -> None:
        self.kept = [int(units) for units in kept]
        self._model = model
        self._times = [layer.value(self.kept) for layer in model.layers]
        self.total = model.fixed + sum(self._times)

    def gain(self, group: int, units: int) -> float:
        before = self.kept[group]
        numbers = self._model.touching.get(group, ())
        self.kept[group] = units
        after = sum(self._model.layers[number].value(self.kept) for number in numbers)
        self.kept[group] = before
        return sum(self._times[number] for number in numbers) - after

    def gains(self, group: int, units: np.ndarray) -> np.ndarray:
        numbers = self._model.touching.get(group, ())
        after = np.zeros(len(units))
        for number in numbers:
            after += self._model.layers[number].values(self.kept, group, units)
        return sum(self._times[number] for number in numbers) - after

    def apply(self, group: int, units: int) -> None:
        self.kept[group] = units
        for number in self._model.touching.get(group, ()):
            self._times[number] = self._model.layers[number].value(self.kept)
        self.total = self._model.fixed + sum(self._times)
