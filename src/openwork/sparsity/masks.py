"""N:M masks: in every group of M consecutive positions along one axis keep the N of largest magnitude.

The rule, for NumPy arrays and torch tensors alike:

* groups of M run along `axis`, restarting for every position of the other axes;
* among equal magnitudes the lower position wins (four equal values under 2:4 keep the first two);
* a length that M does not divide is padded at the end with zeros, so the last, short group keeps its N
  largest, or all of its positions when it has no more than N;
* -0.0 and 0.0 are equal; infinity and NaN count as the largest magnitudes, NaN above infinity.

Magnitudes are compared as integers: clearing the sign bit of an IEEE float leaves an integer that orders as
the magnitude does, for every float format, and no comparison can meet a NaN.

Positions are ranked by comparing the array with itself, moved by 1 .. M-1 positions along the axis: M-1
comparisons of long contiguous runs, whatever the axis, then byte arithmetic. A position stays if fewer than N
others of its group beat it. The work goes through the array in pieces that fit into a processor's cache, so
temporary memory stays small whatever the size of the array.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from openwork.sparsity import compiled

__all__ = ["BoolArray", "PatternCheck", "apply_mask_", "check", "compiled_chooser", "nm_mask"]

BoolArray = npt.NDArray[np.bool_]

# Weights per piece: large enough that a NumPy call costs little per weight, small enough for a 2 MB cache.
_PIECE = 65536
# The same for compiled loops and the innermost cache.
_ROW = 2048
_LARGEST_M = 16
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class PatternCheck:
    """Whether a tensor keeps an N:M pattern along an axis.

    Attributes:
        holds: no group has more than N non-zeros.
        groups: number of groups.
        broken: number of groups that have more than N non-zeros.
        first: index in the tensor of the first position (C order) of the first broken group; None when
            none is.
        zeros: share of the tensor's elements that are zero, 0 to 1.
    """

    holds: bool
    groups: int
    broken: int
    first: tuple[int, ...] | None
    zeros: float

    def __bool__(self) -> bool:
        return self.holds


def nm_mask(weight: Any, n: int = 2, m: int = 4, axis: int = 1, blocks: int = 1) -> Any:
    """Mask of the positions that stay under N:M sparsity.

    Args:
        weight: NumPy array or torch tensor of any shape with at least one axis; floats of 2, 4 or 8 bytes
            (bfloat16 too) or integers.
        n: how many of each group stay, ``1 <= n < m``.
        m: size of a group, ``m <= 16``.
        axis: the axis along which groups run.
        blocks: the axis is this many equal parts, and groups restart in each (a grouped transposed
            convolution).

    Returns:
        Booleans of the shape of `weight`, True where it stays: a NumPy array for an array, a tensor on the
        same device for a tensor.

    Raises:
        ValueError: n, m, axis or blocks is out of range.
        TypeError: `weight` is neither an array nor a tensor, or its elements are of another kind.
    """
    axis = _checked(weight, n, m, axis, blocks)
    torch = _torch_of(weight)
    if torch is not None and weight.device.type != "cpu":
        return _mask_elsewhere(torch, weight.detach(), n, m, axis, blocks)
    bits, kind = _bits_of(weight)
    mask = np.empty(bits.shape, dtype=np.bool_)
    if mask.size:
        _, length, inner = _three_axes(bits.shape, axis, blocks)
        _fill(bits.reshape(-1), mask.reshape(-1), _Magnitude(bits.dtype, kind), n, m, length, inner)
    return mask if torch is None else torch.from_numpy(mask)


def check(weight: Any, axis: int = 1, n: int = 2, m: int = 4, blocks: int = 1) -> PatternCheck:
    """Tell whether `weight` has at most N non-zeros in each group of M, and where it first has more.

    Args:
        weight: as for `nm_mask`.
        axis: the axis along which groups run.
        n: allowed non-zeros.
        m: size of a group.
        blocks: as for `nm_mask`.

    Raises:
        ValueError, TypeError: as for `nm_mask`.
    """
    axis = _checked(weight, n, m, axis, blocks)
    torch = _torch_of(weight)
    if torch is not None:
        # NaN != 0 is true, -0.0 != 0 is false: what is wanted.
        nonzero = (weight.detach() != 0).cpu().numpy()
    else:
        nonzero = np.asarray(weight) != 0
    nonzero = np.asarray(nonzero, dtype=np.bool_)
    outer, length, inner = _three_axes(nonzero.shape, axis, blocks)
    starts = np.arange(0, length, m)
    counts = (
        np.add.reduceat(nonzero.reshape(outer, length, inner), starts, axis=1, dtype=np.int64)
        if nonzero.size
        else np.zeros((outer, 0, inner), dtype=np.int64)
    )
    bad = counts > n
    broken = int(np.count_nonzero(bad))
    first = None
    if broken:
        o, g, i = (int(position) for position in np.argwhere(bad)[0])
        flat = (o * length + g * m) * inner + i
        first = tuple(int(position) for position in np.unravel_index(flat, nonzero.shape))
    zeros = 1.0 - np.count_nonzero(nonzero) / nonzero.size if nonzero.size else 0.0
    return PatternCheck(broken == 0, counts.size, broken, first, float(zeros))


def apply_mask_(weight: Any, mask: Any) -> Any:
    """Set `weight` to exact zero, in place, where `mask` is False; also where it is NaN or infinite.

    Args:
        weight: NumPy array or torch tensor (no gradient is recorded).
        mask: booleans of the same shape; both arrays or both tensors.

    Returns:
        `weight`.
    """
    torch = _torch_of(weight)
    if torch is not None:
        weight.detach().masked_fill_(mask.to(weight.device).logical_not(), 0)
    else:
        weight[~mask] = 0
    return weight


def _torch_of(weight: Any) -> Any:
    """The torch module when `weight` is one of its tensors; it is never imported here."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(weight, torch.Tensor) else None


def _checked(weight: Any, n: int, m: int, axis: int, blocks: int) -> int:
    """Check the arguments; return the axis counted from the front."""
    if not 1 <= n < m <= _LARGEST_M:
        raise ValueError(f"sparsity {n}:{m} is not possible; 1 <= N < M <= {_LARGEST_M} is needed")
    if not hasattr(weight, "shape") or not hasattr(weight, "dtype"):
        raise TypeError(f"weight is a {type(weight).__name__}; a NumPy array or torch tensor is needed")
    rank = len(weight.shape)
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} does not exist in a weight of shape {tuple(weight.shape)}")
    axis %= rank
    if blocks < 1 or weight.shape[axis] % blocks:
        raise ValueError(f"axis {axis} of length {weight.shape[axis]} cannot be cut into {blocks} equal blocks")
    return axis


def _three_axes(shape: tuple[int, ...], axis: int, blocks: int) -> tuple[int, int, int]:
    """Sizes before, of and after the axis, with blocks counted as part of what is before."""
    return math.prod(shape[:axis]) * blocks, shape[axis] // blocks, math.prod(shape[axis + 1 :])


def _bits_of(weight: Any) -> tuple[npt.NDArray[Any], str]:
    """The elements as integers, without a copy if they are contiguous, and their kind.

    The kind is NumPy's letter: f (the bits of floats), i or u.
    """
    torch = _torch_of(weight)
    if torch is not None:
        tensor = weight.detach().contiguous()
        floating = tensor.is_floating_point()
        if tensor.dtype == torch.bool or tensor.is_complex() or tensor.is_quantized:
            raise TypeError(f"weight of {tensor.dtype} cannot be masked; real floats and integers can")
        if floating:
            signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
            tensor = tensor.view(signed)
        array = tensor.numpy()
        kind = "f" if floating else array.dtype.kind
    else:
        array = np.ascontiguousarray(weight).reshape(np.shape(weight))
        # bfloat16 and the float8 formats of ml_dtypes have kind V.
        kind = "f" if array.dtype.kind == "V" and "float" in array.dtype.name else array.dtype.kind
    if kind not in "fiu" or array.dtype.itemsize not in _UNSIGNED:
        raise TypeError(f"weight of {array.dtype} cannot be masked; real floats and integers can")
    if kind == "f":
        array = array.view(_SIGNED[array.dtype.itemsize])
    return array, kind


class _Magnitude:
    """Writes magnitudes as comparable integers."""

    def __init__(self, dtype: np.dtype[Any], kind: str) -> None:
        size = dtype.itemsize
        self._kind = kind
        self._signed = np.dtype(_SIGNED[size])
        # Without the sign bit signed and unsigned order agree, and signed comparison is the faster one.
        self.dtype = self._signed if kind == "f" else np.dtype(_UNSIGNED[size])
        self.clear = self._signed.type(2 ** (8 * size - 1) - 1) if kind == "f" else None

    def __call__(self, values: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        if self.clear is not None:
            np.bitwise_and(values, self.clear, out=out)
        elif self._kind == "i":
            # |-128| wraps round to -128 as int8, whose bits read as 128 unsigned: the right magnitude.
            np.absolute(values, out=out.view(self._signed))
        else:
            np.copyto(out, values)


def _fill(
    bits: npt.NDArray[Any], mask: BoolArray, magnitude: _Magnitude, n: int, m: int, length: int, inner: int
) -> None:
    """Fill `mask` for `bits`, both flat; in memory they are [outer, length, inner]."""
    if magnitude.clear is not None and bits.size >= compiled.LEAST:
        choose = compiled_chooser(bits.dtype, n, m, length, inner)
        if choose is not None:
            choose(bits, mask)
            return
    repeat = _repeat(length, m)
    whole = max(1, _PIECE // (repeat * inner)) * repeat * inner
    size = min(whole, bits.size)
    # A pattern for whole pieces serves weights of all sizes. One longer than a piece is not worth keeping.
    make = _places if repeat * inner <= _PIECE else _places.__wrapped__
    ranks = _Ranks(magnitude, make(n, m, repeat, inner, whole), size, inner)
    for start in range(0, bits.size, size):
        ranks(bits[start : start + size], mask[start : start + size])


def compiled_chooser(dtype: npt.DTypeLike, n: int, m: int, length: int, inner: int) -> Callable[..., None] | None:
    """Machine code that chooses masks of float weights; None if there is none (see `compiled`).

    Args:
        dtype: signed integers of the size of the floats.
        n, m: the pattern.
        length: of the axis that groups run along.
        inner: distance in memory of neighbours along the axis.

    Returns:
        ``choose(bits, mask)`` for flat arrays of whole vectors along the axis: `bits` are the weights seen as integers,
        `mask` is written.
    """
    kernels = compiled.kernels()
    if kernels is None:
        return None
    kind = np.dtype(dtype).type
    clear = kind(np.iinfo(kind).max)
    if (n, m, length % 4, inner) == (2, 4, 0, 1):
        return functools.partial(kernels.choose_neighbours, clear=clear)
    repeat = _repeat(length, m)
    make = _above if repeat * inner <= _PIECE else _above.__wrapped__
    above = make(m, repeat, inner, max(1, _ROW // (repeat * inner)))
    return functools.partial(kernels.choose, above=above, n=n, inner=inner, clear=clear)


def _repeat(length: int, m: int) -> int:
    """After how many positions groups lie as before: after each, or each vector if its last group is short."""
    return length if length % m else min(m, length)


@functools.lru_cache(maxsize=32)
def _above(m: int, length: int, inner: int, times: int) -> npt.NDArray[np.int8]:
    """How many higher positions each place of [times, length, inner] has in its group. Read only."""
    place = np.arange(length * inner) // inner
    above = np.minimum(m - 1, length - 1 - place // m * m) - place % m
    repeated = np.tile(above, times).astype(np.int8)
    repeated.flags.writeable = False
    return repeated


@functools.lru_cache(maxsize=16)
def _places(n: int, m: int, length: int, inner: int, size: int) -> tuple[npt.NDArray[np.int8], tuple[BoolArray, ...]]:
    """What the rule needs to know of each place of a piece, which is [size / length / inner, length, inner].

    Returns:
        How many higher positions a place has in its group, less N; and for steps 1, 2, .. whether the place so many
        positions on belongs to the same group. Read only.
    """
    above = _above.__wrapped__(m, length, inner, size // (length * inner))
    excess = (above - n).astype(np.int8)
    same_group = tuple(above >= step for step in range(1, min(m, int(above.max()) + 1)))
    for array in (excess, *same_group):
        array.flags.writeable = False
    return excess, same_group


class _Ranks:
    """The mask of one piece.

    Args:
        magnitude: writes magnitudes.
        places: what `_places` returns, for pieces of `size` or more.
        size: weights of the largest piece.
        inner: distance in memory of neighbours along the axis.
    """

    def __init__(
        self,
        magnitude: _Magnitude,
        places: tuple[npt.NDArray[np.int8], tuple[BoolArray, ...]],
        size: int,
        inner: int,
    ) -> None:
        self._magnitude = magnitude
        self._inner = inner
        self._excess, self._same_group = places
        # The last places look beyond the piece; what they see there is of no group of theirs.
        beyond = len(self._same_group) * inner
        self._keys = np.empty(size + beyond, dtype=magnitude.dtype)
        self._balance = np.empty(size + beyond, dtype=np.int8)
        self._keys[size:] = 0
        self._balance[size:] = 0
        self._wins = np.empty(size, dtype=np.bool_)

    def __call__(self, bits: npt.NDArray[Any], mask: BoolArray) -> None:
        size = bits.size
        keys, balance = self._keys[:size], self._balance[:size]
        wins = self._wins[:size]
        counts = wins.view(np.int8)
        self._magnitude(bits, keys)
        # Of the higher positions, those that do not lose to this one beat it. So the positions that beat this one are
        # balance + N, where balance = higher positions - N - higher ones that this beats + lower ones that beat this.
        source = self._excess[:size]
        for step, same_group in enumerate(self._same_group, 1):
            apart = slice(step * self._inner, step * self._inner + size)
            np.greater_equal(keys, self._keys[apart], out=wins)
            np.logical_and(wins, same_group[:size], out=wins)
            np.subtract(source, counts, out=balance)
            np.add(self._balance[apart], counts, out=self._balance[apart])
            source = balance
        np.less(source, np.int8(0), out=mask)


def _mask_elsewhere(torch: Any, weight: Any, n: int, m: int, axis: int, blocks: int) -> Any:
    """The same rule in torch operators, for tensors on another device than the CPU."""
    if weight.dtype == torch.bool or weight.is_complex() or weight.is_quantized:
        raise TypeError(f"weight of {weight.dtype} cannot be masked; real floats and integers can")
    if weight.is_floating_point():
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
        bits = weight.contiguous().view(kind)
        keys = torch.bitwise_and(bits, torch.iinfo(kind).max)
    else:
        # One step wider, so that the magnitude of the most negative value exists.
        wider = {1: torch.int16, 2: torch.int32, 4: torch.int64, 8: torch.int64}[weight.element_size()]
        keys = weight.contiguous().to(wider).abs()
    outer, length, inner = _three_axes(tuple(weight.shape), axis, blocks)
    keys = keys.reshape(outer, length, inner)
    short = -length % m
    if short:
        # -1 is below every magnitude: the padding never wins a place.
        keys = torch.nn.functional.pad(keys, (0, 0, 0, short), value=-1)
    a_group = keys.reshape(outer, -1, m, inner).unbind(2)
    if (n, m) == (2, 4):
        a, b, c, d = a_group
        p, q, r, s = torch.maximum(a, b), torch.minimum(a, b), torch.maximum(c, d), torch.minimum(c, d)
        a_first, c_first, front, back = a >= b, c >= d, q >= r, s > p
        kept = [
            front | (a_first & ~back),
            front | ~(a_first | back),
            back | (c_first & ~front),
            back | ~(c_first | front),
        ]
    else:
        losses = [torch.zeros_like(a_group[0], dtype=torch.uint8) for _ in range(m)]
        for low in range(m):
            for high in range(low + 1, m):
                wins = a_group[low] >= a_group[high]
                losses[high] += wins
                losses[low] += ~wins
        kept = [loss < n for loss in losses]
    mask = torch.stack(kept, dim=2).reshape(outer, -1, inner)[:, :length]
    return mask.reshape(weight.shape).contiguous()
