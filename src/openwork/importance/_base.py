"""What a criterion is, and the reductions that criteria share.

A criterion gives each unit of a prune group a number: the lower, the less the model loses with the unit.
It sees the group and two functions that return arrays by parameter name, so it knows no framework.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from openwork.errors import WeightsError
from openwork.graph.groups import Member, PruneGroup, Role

__all__ = [
    "ArraySource",
    "FloatArray",
    "GradientSource",
    "Importance",
    "channel_sums",
    "counted",
    "unit_sums",
]

FloatArray = npt.NDArray[np.float64]
ArraySource = Callable[[str], npt.NDArray[np.floating]]
GradientSource = Callable[[str], npt.NDArray[np.floating] | None]


class Importance(abc.ABC):
    """A criterion that scores the units of a prune group.

    Subclass it, give `name` and `score`, and pass the object wherever a criterion's name is taken.

    Attributes:
        name: what users write to ask for it.
        needs_gradients: whether `score` reads the gradients; callers then run a backward pass first.
    """

    name: ClassVar[str] = ""
    needs_gradients: ClassVar[bool] = False

    @abc.abstractmethod
    def score(self, group: PruneGroup, weights: ArraySource, gradients: GradientSource | None = None) -> FloatArray:
        """Score the units of one group.

        Args:
            group: the group.
            weights: returns the array of a parameter or buffer, by its qualified name.
            gradients: returns the gradient of the loss by the parameter, or None where it has none (buffers).

        Returns:
            float64 [group.units]; the lowest go first, ties by lowest index.

        Raises:
            WeightsError: a weight or gradient that is read is NaN or infinite; the parameter is named.
            ValueError: the criterion needs gradients and got none.
        """


def channel_sums(member: Member, values: npt.NDArray[np.floating]) -> FloatArray:
    """Sum `values`, shaped like the member's parameter, over everything but the channel axis.

    The channel axis of a grouped convolution's weight holds one block at a time: ``values.shape[axis]`` is
    then ``member.size / blocks`` and the blocks lie one after another along the axis of the other channels:
    the one before it in [out, in / groups, taps..], the one behind it in [taps.., in / groups, out].

    Returns:
        float64 [member.size].

    Raises:
        WeightsError: the shape does not fit the member.
    """
    length = values.shape[member.axis] if member.axis < values.ndim else 0
    if length == member.size:
        # Reduce the leading axes first, then the trailing ones: both are long contiguous runs.
        lead = int(np.prod(values.shape[: member.axis], dtype=np.int64))
        flat = values.reshape(lead, length, -1)
        if lead == 1:
            return flat[0].sum(axis=1, dtype=np.float64)
        if flat.shape[2] == 1:
            return flat[:, :, 0].sum(axis=0, dtype=np.float64)
        return flat.reshape(lead, -1).sum(axis=0, dtype=np.float64).reshape(length, -1).sum(axis=1)
    blocks = member.size // length if length else 0
    rows_axis = 0 if member.axis == 1 else member.axis + 1
    if (
        blocks * length != member.size
        or member.axis == 0
        or rows_axis >= values.ndim
        or values.shape[rows_axis] % blocks
    ):
        raise WeightsError(
            f"{member.parameter}: axis {member.axis} of shape {tuple(values.shape)} does not hold "
            f"{member.size} channels"
        )
    ordered = np.moveaxis(values, (rows_axis, member.axis), (0, 1))
    rows = ordered.reshape(blocks, ordered.shape[0] // blocks, *ordered.shape[1:])
    others = tuple(axis for axis in range(rows.ndim) if axis not in (0, 2))
    return rows.sum(axis=others, dtype=np.float64).reshape(-1)


def read_square_sums(source: ArraySource, member: Member) -> tuple[FloatArray, int]:
    """Sums of squares of the member's parameter as `channel_sums` gives them, and the parameter's size.

    Squares and sums of a channel in the weights' own precision, float32 at least, where NumPy has a fast dot product:
    one pass over the memory, 2e-7 apart.

    Raises:
        WeightsError: as `read` and `channel_sums`.
    """
    values = np.asarray(source(member.parameter))
    if values.dtype.itemsize < 4:
        values = values.astype(np.float32)
    dot = getattr(np, "vecdot", None)
    with np.errstate(over="ignore", invalid="ignore"):
        if dot is not None and member.axis == 0 and values.shape[:1] == (member.size,) and values.flags.c_contiguous:
            rows = values.reshape(member.size, -1)
            sums = np.asarray(dot(rows, rows), dtype=np.float64)
        else:
            sums = channel_sums(member, np.square(values))
    if not np.isfinite(sums).all():
        # Either the weights are not finite, which is refused, or their squares are too large.
        sums = channel_sums(member, np.square(read(source, member.parameter), dtype=np.float64))
    return sums, values.size


def unit_sums(member: Member, channels: FloatArray, units: int) -> FloatArray:
    """Sum per-channel values [member.size] over the positions of each unit: float64 [units]."""
    sums = np.bincount(member.units, weights=channels[member.positions], minlength=units)
    return np.asarray(sums, dtype=np.float64)


def counted(group: PruneGroup) -> tuple[Member, ...]:
    """The members whose weights speak for the channel: producers, else consumers, else all."""
    return group.producers or group.consumers or group.members


def read(source: ArraySource, parameter: str) -> npt.NDArray[np.floating]:
    """The array of `parameter`, refused when it is not finite (one cheap sum finds NaN and infinity)."""
    values = np.asarray(source(parameter))
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = not np.isfinite(values.sum(dtype=np.float64))
    if suspicious and not np.isfinite(values).all():
        bad = int(values.size - np.isfinite(values).sum())
        raise WeightsError(f"{parameter}: {bad} of {values.size} values are NaN or infinite")
    return values


def read_gradient(
    criterion: Importance, source: GradientSource | None, parameter: str
) -> npt.NDArray[np.floating] | None:
    """The gradient of `parameter`, or None; refused when it is not finite."""
    if source is None:
        raise ValueError(f"importance {criterion.name!r} needs gradients, none were given")
    gradient = source(parameter)
    if gradient is None:
        return None
    values = np.asarray(gradient)
    if not np.isfinite(values.sum(dtype=np.float64)) and not np.isfinite(values).all():
        bad = int(values.size - np.isfinite(values).sum())
        raise WeightsError(f"gradient of {parameter}: {bad} of {values.size} values are NaN or infinite")
    return values


def is_learned(member: Member) -> bool:
    """False for running statistics, which describe the data and are no weights of the model."""
    return not (member.role is Role.CARRIES and member.parameter.rpartition(".")[2] in ("running_mean", "running_var"))
