"""Loops over weights as machine code, where numba is installed (the extra ``fast``).

NumPy goes through memory for each step of a formula; these loops take all steps while a few thousand weights are in
the innermost cache. The results are those of NumPy, bit for bit. Nothing here is needed: who calls has a way without.

Loading numba and compiling take their time (later processes read the result from numba's cache), so small arrays stay
with NumPy.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["LEAST", "Kernels", "kernels"]

# Elements of an array from which on compiled loops are worth their start.
LEAST = 65536


class Kernels(NamedTuple):
    """The compiled loops. All arrays are flat and contiguous.

    Attributes:
        choose: ``(bits, mask, above, n, inner, clear)`` chooses an N:M mask, see `choose`.
        choose_neighbours: ``(bits, mask, clear)``, the same for 2 of 4 that are neighbours in memory.
        multiply: ``(values, mask, out)`` writes float `values` times boolean `mask` to `out`, other memory.
        multiply_in_place: ``(values, mask)``.
    """

    choose: Callable[..., None]
    choose_neighbours: Callable[..., None]
    multiply: Callable[..., None]
    multiply_in_place: Callable[..., None]


@functools.cache
def kernels() -> Kernels | None:
    """The loops, compiled at their first call; None without numba, with a warning where it cannot be loaded."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        import numba
    except Exception as error:
        # It refuses releases of NumPy newer than itself, for one.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        message = f"numba does not load, NumPy is used in its place, slower: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    loops: list[Any] = []
    for loop in (choose, choose_neighbours, multiply, multiply_in_place):
        try:
            loops.append(numba.njit(loop, nogil=True, cache=True))
        except RuntimeError:
            # No folder can be written to: compile in each process.
            loops.append(numba.njit(loop, nogil=True))
    return Kernels(*loops)


def choose(
    bits: npt.NDArray[Any],
    mask: npt.NDArray[np.bool_],
    above: npt.NDArray[np.int8],
    n: int,
    inner: int,
    clear: Any,
) -> None:
    """Choose an N:M mask; compiled by `kernels`.

    Args:
        bits: float weights seen as integers.
        mask: is written.
        above: int8, how many higher positions a place has in its group; the pattern repeats along `bits`.
        n: weights kept of each group.
        inner: distance in memory of neighbours along the axis.
        clear: all bits but the sign, of the type of `bits`.
    """
    row = above.size
    steps = above.max()
    # The last places look beyond the row; what they see there is of no group of theirs.
    keys = np.zeros(row + steps * inner, bits.dtype)
    balance = np.zeros(row + steps * inner, np.int8)
    wins = np.zeros(row, np.int8)
    for start in range(0, bits.size, row):
        size = min(row, bits.size - start)
        row_bits = bits[start : start + size]
        row_mask = mask[start : start + size]
        for place in range(size):
            keys[place] = row_bits[place] & clear
        for place in range(size):
            balance[place] = above[place]
        for step in range(1, steps + 1):
            higher = keys[step * inner : step * inner + size]
            beaten = balance[step * inner : step * inner + size]
            for place in range(size):
                wins[place] = np.int8(keys[place] >= higher[place]) & np.int8(above[place] >= step)
            for place in range(size):
                balance[place] -= wins[place]
            for place in range(size):
                beaten[place] += wins[place]
        for place in range(size):
            row_mask[place] = balance[place] < n


def choose_neighbours(bits: npt.NDArray[Any], mask: npt.NDArray[np.bool_], clear: Any) -> None:
    """`choose` for 2:4 along the last axis, of a length that 4 divides."""
    for group in range(bits.size // 4):
        place = 4 * group
        a, b = bits[place] & clear, bits[place + 1] & clear
        c, d = bits[place + 2] & clear, bits[place + 3] & clear
        a_first, c_first = a >= b, c >= d
        # Both of a pair stay if its lesser one is not below the greater one of the other pair.
        front = min(a, b) >= max(c, d)
        back = min(c, d) > max(a, b)
        mask[place] = front | (a_first & (not back))
        mask[place + 1] = front | (not (a_first | back))
        mask[place + 2] = back | (c_first & (not front))
        mask[place + 3] = back | (not (c_first | front))


def multiply(values: npt.NDArray[Any], mask: npt.NDArray[np.bool_], out: npt.NDArray[Any]) -> None:
    """Write `values` times `mask` to `out`; compiled by `kernels`."""
    for place in range(values.size):
        out[place] = values[place] * mask[place]


def multiply_in_place(values: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> None:
    """Multiply `values` by `mask`; compiled by `kernels`."""
    for place in range(values.size):
        values[place] *= mask[place]
