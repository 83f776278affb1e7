"""N:M masks: in every group of M consecutive positions along one axis keep the N of largest magnitude.

The rule, for NumPy arrays and torch tensors alike:

* groups of M run along `axis`, restarting for every position of the other axes;
* among equal magnitudes the lower position wins (four equal values under 2:4 keep the first two);
* a length that M does not divide is padded at the end with zeros, so the last, short group keeps its N
  largest, or all of its positions when it has no more than N;
* -0.0 and 0.0 are equal; infinity and NaN count as the largest magnitudes, NaN above infinity.

Magnitudes are compared as integers: clearing the sign bit of an IEEE float leaves an integer that orders as
the magnitude does, for every float format, and no comparison can meet a NaN.

2:4 takes four comparisons and four minima or maxima per group. With p = max(a, b), q = min(a, b),
r = max(c, d), s = min(c, d): q >= r keeps a and b; s > p keeps c and d; else p and r stay. Other N:M rank
each position by counting the ones that beat it. Both work through the array in pieces that fit into a
processor's cache, so temporary memory stays below 2 MB whatever the size of the array.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BoolArray", "PatternCheck", "apply_mask_", "check", "nm_mask"]

BoolArray = npt.NDArray[np.bool_]

# Weights per piece: large enough that a NumPy call costs little per weight, small enough for a 2 MB cache.
_PIECE = 98304
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
        shape = _three_axes(bits.shape, axis, blocks)
        _fill(bits.reshape(shape), mask.reshape(shape), _Magnitude(bits.dtype, kind), n, m)
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
    outer = int(np.prod(shape[:axis], dtype=np.int64)) * blocks
    return outer, shape[axis] // blocks, int(np.prod(shape[axis + 1 :], dtype=np.int64))


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
    """Writes the magnitudes of a strided plane into a contiguous one, as comparable integers."""

    def __init__(self, dtype: np.dtype[Any], kind: str) -> None:
        size = dtype.itemsize
        self._kind = kind
        self._signed = np.dtype(_SIGNED[size])
        # Without the sign bit signed and unsigned order agree, and signed comparison is the faster one.
        self.dtype = self._signed if kind == "f" else np.dtype(_UNSIGNED[size])
        self._clear = self._signed.type(2 ** (8 * size - 1) - 1)

    def __call__(self, plane: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        if self._kind == "f":
            np.bitwise_and(plane, self._clear, out=out)
        elif self._kind == "i":
            # |-128| wraps round to -128 as int8, whose bits read as 128 unsigned: the right magnitude.
            np.absolute(plane, out=out.view(self._signed))
        else:
            np.copyto(out, plane)


def _fill(bits: npt.NDArray[Any], mask: BoolArray, magnitude: _Magnitude, n: int, m: int) -> None:
    """Fill `mask` for `bits`, both [outer, length, inner]."""
    outer, length, inner = bits.shape
    full, tail = divmod(length, m)
    if tail and tail <= n:
        mask[:, full * m :] = True
    elif tail:
        _by_pieces(bits[:, None, full * m :], mask[:, None, full * m :], _Ranks(magnitude, tail, n))
    if full:
        # Without a tail the groups form one long axis: pieces may cross from one outer position to the next.
        shape = (outer, full, m, inner) if tail else (1, outer * full, m, inner)
        kernel = _TwoOfFour(magnitude) if (n, m) == (2, 4) else _Ranks(magnitude, m, n)
        whole = slice(0, full * m)
        _by_pieces(_split(bits[:, whole], shape), _split(mask[:, whole], shape), kernel)


def _split(array: npt.NDArray[Any], shape: tuple[int, int, int, int]) -> npt.NDArray[Any]:
    """A view (never a copy: results are written through it) with the group axis divided in two."""
    view = array.view()
    if view.flags.c_contiguous:
        view.shape = shape
        return view
    m = shape[2]
    steps = array.strides
    return np.lib.stride_tricks.as_strided(array, shape, (steps[0], steps[1] * m, steps[1], steps[2]))


def _by_pieces(bits: npt.NDArray[Any], mask: BoolArray, kernel: _TwoOfFour | _Ranks) -> None:
    """Run `kernel` over [outer, groups, m, inner] in pieces of about `_PIECE` weights."""
    outer, groups, m, inner = bits.shape
    per_group = m * inner
    if groups * per_group * 2 <= _PIECE:
        step = max(1, _PIECE // (groups * per_group))
        kernel.reserve((min(step, outer), groups, inner))
        for start in range(0, outer, step):
            kernel(bits[start : start + step], mask[start : start + step])
        return
    step = max(1, _PIECE // per_group)
    kernel.reserve((1, min(step, groups), inner))
    for o in range(outer):
        for start in range(0, groups, step):
            kernel(bits[o : o + 1, start : start + step], mask[o : o + 1, start : start + step])


class _TwoOfFour:
    """2:4 for one piece; see the head of the module."""

    def __init__(self, magnitude: _Magnitude) -> None:
        self._magnitude = magnitude
        self._values: npt.NDArray[Any] = np.empty(0)
        self._flags: BoolArray = np.empty(0, dtype=np.bool_)

    def reserve(self, shape: tuple[int, int, int]) -> None:
        self._values = np.empty((6, *shape), dtype=self._magnitude.dtype)
        self._flags = np.empty((5, *shape), dtype=np.bool_)

    def __call__(self, bits: npt.NDArray[Any], mask: BoolArray) -> None:
        rows, groups, _, _ = bits.shape
        a, b, c, d, q, s = self._values[:, :rows, :groups]
        a_first, c_first, front, back, t = self._flags[:, :rows, :groups]
        for position, plane in enumerate((a, b, c, d)):
            self._magnitude(bits[:, :, position], plane)
        np.greater_equal(a, b, out=a_first)
        np.greater_equal(c, d, out=c_first)
        np.minimum(a, b, out=q)
        np.maximum(a, b, out=a)
        np.minimum(c, d, out=s)
        np.maximum(c, d, out=c)
        np.greater_equal(q, c, out=front)
        np.greater(s, a, out=back)
        # Of booleans: greater(x, y) is "x and not y", less_equal(x, y) is "not x, or y".
        np.greater(a_first, back, out=t)
        np.logical_or(t, front, out=mask[:, :, 0])
        np.logical_or(a_first, back, out=t)
        np.less_equal(t, front, out=mask[:, :, 1])
        np.greater(c_first, front, out=t)
        np.logical_or(t, back, out=mask[:, :, 2])
        np.logical_or(c_first, front, out=t)
        np.less_equal(t, back, out=mask[:, :, 3])


class _Ranks:
    """Any N of M for one piece: a position stays if fewer than N others beat it."""

    def __init__(self, magnitude: _Magnitude, m: int, n: int) -> None:
        self._magnitude = magnitude
        self._m = m
        self._n = n
        self._values: npt.NDArray[Any] = np.empty(0)
        self._losses: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._wins: BoolArray = np.empty(0, dtype=np.bool_)

    def reserve(self, shape: tuple[int, int, int]) -> None:
        self._values = np.empty((self._m, *shape), dtype=self._magnitude.dtype)
        self._losses = np.empty((self._m, *shape), dtype=np.uint8)
        self._wins = np.empty(shape, dtype=np.bool_)

    def __call__(self, bits: npt.NDArray[Any], mask: BoolArray) -> None:
        rows, groups, _, _ = bits.shape
        values = self._values[:, :rows, :groups]
        losses = self._losses[:, :rows, :groups]
        wins = self._wins[:rows, :groups]
        for position in range(self._m):
            self._magnitude(bits[:, :, position], values[position])
        losses[...] = 0
        for low in range(self._m):
            for high in range(low + 1, self._m):
                np.greater_equal(values[low], values[high], out=wins)
                losses[high] += wins
                np.logical_not(wins, out=wins)
                losses[low] += wins
        for position in range(self._m):
            np.less(losses[position], self._n, out=mask[:, :, position])


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
