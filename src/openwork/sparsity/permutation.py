"""Reorder input channels so that a 2:4 mask keeps more magnitude.

Which four channels share a group is free as long as producers and consumers agree on the order. The search
improves the grouping two stripes (groups of four channels) at a time: of the 35 ways to divide their eight
channels into two stripes it takes the best. All rows count at once. Rounds of pairs follow until no pair
gains; then a few channels are thrown about at random and the search goes on from there, keeping what is better,
while time is left and something is found now and then. The pairwise search is that of Pool and Yu, "Channel
permutations for N:M sparsity" (2021), there with bounded regressions in place of the random throws.

For one row and channels a, b, c, d the magnitude kept is the largest of max(a, b) + max(c, d), a + b and
c + d, so that all 70 choices of four among eight come from maxima and sums of their 28 pairs.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["PermutationResult", "kept_magnitude", "search_permutation"]

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

# Numbers in the arrays of one batch of stripe pairs: they stay in a processor's cache.
_BATCH = 16384
_LARGEST_ROWS = 512
# Throws in a row that bring nothing, for each stripe, after which the search ends before its time.
_PATIENCE = 40

_PAIRS = list(itertools.combinations(range(8), 2))
_PAIR_INDEX = {pair: index for index, pair in enumerate(_PAIRS)}
# The 35 ways to divide 0..7 into two fours: the first four always hold 0. The first way changes nothing.
_DIVISIONS = [
    ((0, *rest), tuple(sorted(set(range(1, 8)) - set(rest)))) for rest in itertools.combinations(range(1, 8), 3)
]


@dataclass(frozen=True)
class PermutationResult:
    """An order of channels and what it brings.

    Attributes:
        order: int64 [channels]; channel ``order[i]`` moves to place i.
        before: magnitude that a 2:4 mask keeps in the given order.
        after: magnitude kept in the new order, never less than `before`.
        best_possible: half of each row's magnitudes, the largest, kept freely: a bound that no order passes.
    """

    order: IntArray
    before: float
    after: float
    best_possible: float

    @property
    def gain(self) -> float:
        """Share of the possible gain that was found: (after - before) / (best_possible - before)."""
        room = self.best_possible - self.before
        return (self.after - self.before) / room if room > 0 else 0.0


def kept_magnitude(rows: npt.NDArray[np.floating]) -> float:
    """Sum of the two largest magnitudes of each four neighbours in each row.

    Args:
        rows: [rows, channels]; a last group that is short counts as filled up with zeros.
    """
    magnitudes = np.abs(np.asarray(rows, dtype=np.float32))
    short = -magnitudes.shape[1] % 4
    groups = np.pad(magnitudes, ((0, 0), (0, short))).reshape(-1, 4)
    a, b, c, d = groups.T
    best = np.maximum(np.maximum(a, b) + np.maximum(c, d), np.maximum(a + b, c + d))
    return float(best.sum(dtype=np.float64))


def search_permutation(
    rows: npt.NDArray[np.floating], seconds: float = 1.0, seed: int = 0, blocks: int = 1
) -> PermutationResult:
    """Find an order of channels under which a 2:4 mask keeps more magnitude.

    Args:
        rows: [rows, channels], the weights of all layers that read the channels, one above the other (of a
            convolution one row for each output channel and kernel place).
        seconds: time after which no further round begins; the search ends before when throws have long brought
            nothing. Ample for some hundred channels; with thousands the descent is cut off, with most of its gain made.
        seed: of the random numbers.
        blocks: channels are this many equal blocks and none leaves its own (groups of a convolution).

    Returns:
        The best order found; the given one when nothing is better.

    Raises:
        ValueError: `rows` is not a matrix, or its channels cannot be cut into `blocks`.
    """
    if np.ndim(rows) != 2:
        raise ValueError(f"rows has {np.ndim(rows)} axes; a matrix [rows, channels] is needed")
    magnitudes = np.abs(np.asarray(rows, dtype=np.float32))
    channels = magnitudes.shape[1]
    if blocks < 1 or channels % blocks:
        raise ValueError(f"{channels} channels cannot be cut into {blocks} equal blocks")
    size = channels // blocks
    order = np.concatenate(
        [
            start + _search(magnitudes[:, start : start + size], seconds / blocks, seed + start)
            for start in range(0, channels, size)
        ]
        if channels
        else [np.empty(0, dtype=np.int64)]
    )
    if size % 4:
        # Groups restart in each block, so blocks are judged one by one.
        parts = [slice(start, start + size) for start in range(0, channels, size)]
    else:
        parts = [slice(0, channels)]
    before = sum(kept_magnitude(magnitudes[:, part]) for part in parts)
    after = sum(kept_magnitude(magnitudes[:, order[part]]) for part in parts)
    free = _free_half(magnitudes)
    if after <= before:
        return PermutationResult(np.arange(channels), before, before, free)
    return PermutationResult(order, before, after, free)


def _free_half(magnitudes: FloatArray) -> float:
    half = magnitudes.shape[1] // 2
    if not half:
        return 0.0
    largest = np.partition(magnitudes, magnitudes.shape[1] - half, axis=1)[:, -half:]
    return float(largest.sum(dtype=np.float64))


def _search(magnitudes: FloatArray, seconds: float, seed: int) -> IntArray:
    """The order of the channels of one block. A tail of channels without a full group stays where it is."""
    channels = magnitudes.shape[1]
    stripes = channels // 4
    order = np.arange(channels)
    if stripes < 2:
        return order
    generator = np.random.default_rng(seed)
    sample = magnitudes[:, : stripes * 4]
    if sample.shape[0] > _LARGEST_ROWS:
        # Rows are alike enough that some hundreds rank the divisions; the caller judges by all of them.
        sample = sample[generator.choice(sample.shape[0], _LARGEST_ROWS, replace=False)]
    search = _Search(np.ascontiguousarray(sample.T), generator)
    deadline = time.monotonic() + seconds
    search.descend(None, deadline)
    search.improve(deadline)
    order[: stripes * 4] = search.order
    return order


class _Search:
    def __init__(self, columns: FloatArray, generator: np.random.Generator) -> None:
        self._columns = columns
        self._generator = generator
        self._stripes = columns.shape[0] // 4
        self.order = np.arange(columns.shape[0])
        self._work = max(1, _BATCH // columns.shape[1])

    def _gains(self, order: IntArray, first: IntArray, second: IntArray) -> tuple[FloatArray, IntArray]:
        """For pairs of stripes: the gain of the best division, and which it is."""
        gains = np.empty(first.size, dtype=np.float32)
        best = np.empty(first.size, dtype=np.int64)
        groups = order.reshape(-1, 4)
        for start in range(0, first.size, self._work):
            part = slice(start, start + self._work)
            eight = self._columns[np.concatenate((groups[first[part]], groups[second[part]]), axis=1)]
            high = {}
            both = {}
            for i, j in _PAIRS:
                high[i, j] = np.maximum(eight[:, i], eight[:, j])
                both[i, j] = eight[:, i] + eight[:, j]
            kept = np.empty((len(_DIVISIONS), eight.shape[0]), dtype=np.float32)
            total = np.empty(eight[:, 0].shape, dtype=np.float32)
            for number, division in enumerate(_DIVISIONS):
                sums = []
                for a, b, c, d in division:
                    np.add(high[a, b], high[c, d], out=total)
                    np.maximum(total, both[a, b], out=total)
                    np.maximum(total, both[c, d], out=total)
                    sums.append(total.sum(axis=1))
                kept[number] = sums[0] + sums[1]
            best[part] = kept.argmax(axis=0)
            gains[part] = kept.max(axis=0) - kept[0]
        return gains, best

    def _divide(self, order: IntArray, first: int, second: int, division: int) -> None:
        groups = order.reshape(-1, 4)
        eight = np.concatenate((groups[first], groups[second]))
        one, other = _DIVISIONS[division]
        groups[first], groups[second] = eight[list(one)], eight[list(other)]

    def descend(self, touched: set[int] | None, deadline: float) -> float:
        """Divide pairs of stripes anew while any gains and time is left; of touched stripes only if given.

        Returns:
            The total gain.
        """
        total = 0.0
        smallest = 1e-6 * float(self._columns.sum(dtype=np.float64)) / max(1, self._stripes)
        dirty = np.ones(self._stripes, dtype=bool)
        if touched is not None:
            dirty[:] = False
            dirty[list(touched)] = True
        while dirty.any() and time.monotonic() < deadline:
            first, second = self._pairs(dirty)
            gains, best = self._gains(self.order, first, second)
            dirty[:] = False
            for index in np.argsort(-gains):
                if gains[index] <= smallest:
                    break
                i, j = int(first[index]), int(second[index])
                if dirty[i] or dirty[j]:
                    continue
                self._divide(self.order, i, j, int(best[index]))
                dirty[i] = dirty[j] = True
                total += float(gains[index])
        return total

    def _pairs(self, dirty: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
        """Pairs to look at: all with a dirty stripe, or where these are too many, some drawn at random."""
        count = self._stripes
        first, second = np.triu_indices(count, 1)
        wanted = dirty[first] | dirty[second]
        first, second = first[wanted], second[wanted]
        # Each stripe can change once a round: beyond some partners for each, more pairs bring little.
        limit = max(2048, 4 * count)
        if first.size > limit:
            chosen = self._generator.choice(first.size, limit, replace=False)
            first, second = first[chosen], second[chosen]
        return first, second

    def improve(self, deadline: float) -> None:
        """Throw channels about and descend again, while time is left; keep what is better."""
        if self._stripes < 3:
            return
        failed = 0
        while time.monotonic() < deadline and failed < _PATIENCE * self._stripes:
            count = min(self._stripes, 3)
            stripes = self._generator.choice(self._stripes, count, replace=False)
            kept = self.order.copy()
            before = self._value(stripes)
            groups = self.order.reshape(-1, 4)
            places = self._generator.integers(0, 4, count)
            groups[stripes, places] = np.roll(groups[stripes, places], 1)
            change = self._value(stripes) - before + self.descend({int(stripe) for stripe in stripes}, deadline)
            # Rounding makes gains of its own.
            failed = 0 if change > 1e-6 * before else failed + 1
            if change <= 0:
                self.order = kept

    def _value(self, stripes: IntArray) -> float:
        a, b, c, d = self._columns[self.order.reshape(-1, 4)[stripes]].swapaxes(0, 1)
        best = np.maximum(np.maximum(a, b) + np.maximum(c, d), np.maximum(a + b, c + d))
        return float(best.sum(dtype=np.float64))
