"""What the analysis answers: groups of units that may be removed, and what is frozen, with the reason.

A *unit* is the smallest thing that can be removed: a set of (parameter, axis, position) that lives or dies
together. Units that touch the same axes of the same parameters, with the same multiplicity, form a *prune
group*. This module is data only: importance, search and plans read it, no framework is needed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

__all__ = ["AxisSize", "CostTerm", "Frozen", "IntArray", "Member", "PruneGroup", "Role"]


class Role(enum.StrEnum):
    """What an axis of a parameter does with the channel it carries."""

    PRODUCES = "produces"  # the output axis of a contraction's weight: removing a position stops making a channel
    CONSUMES = "consumes"  # the contracted axis: the channel is read here
    CARRIES = "carries"  # norm weights, biases, depthwise filters, running statistics, embeddings' width


@dataclass(frozen=True, eq=False)
class Member:
    """The positions of one axis of one parameter or buffer that belong to a group.

    Attributes:
        parameter: qualified name, e.g. ``layer1.0.conv1.weight``.
        axis: the axis of that tensor.
        role: see `Role`.
        size: full length of the channel axis. For the input axis of a grouped convolution this is the number
            of input channels of the whole layer, not of one group.
        positions: int64 [m], ascending, in ``range(size)``.
        units: int64 [m], the unit (``range(group.units)``) of each position.
        blocks: number of equal consecutive blocks that `size` is made of, when the same number must go
            from each (the input axis of a grouped convolution), else 1.
        layer: name of the layer that the parameter belongs to, where parameter names do not say it.
    """

    parameter: str
    axis: int
    role: Role
    size: int
    positions: IntArray
    units: IntArray
    blocks: int = 1
    layer: str = ""

    @property
    def module(self) -> str:
        """Path of the module (name of the layer) that owns the parameter; empty for the root."""
        return self.layer or self.parameter.rpartition(".")[0]

    @property
    def multiplicity(self) -> float:
        """Positions per unit on this axis."""
        return len(self.positions) / max(1, int(self.units.max(initial=-1)) + 1)


@dataclass(frozen=True, eq=False)
class PruneGroup:
    """Units that are interchangeable for the structure of the model; any of them may go, others stay.

    Attributes:
        index: place in ``analysis.groups``.
        units: number of units.
        members: the axes of parameters that shrink with it.
        block_of: int64 [units], the block of each unit. All zeros when there is no constraint between units.
        steps: int64 [blocks], units that must go from each block in one step; all ones where the blocks just
            lose the same number. (Where a model's code equates the width of the residual stream with heads *
            features, one step takes a head of every attention and as many channels of the stream.)
    """

    index: int
    units: int
    members: tuple[Member, ...]
    block_of: IntArray
    steps: IntArray

    @property
    def blocks(self) -> int:
        """Number of blocks that must lose units in step."""
        return len(self.steps)

    @property
    def most_steps(self) -> int:
        """How many steps can be taken with at least one unit left in every block."""
        sizes = np.bincount(self.block_of, minlength=len(self.steps))
        return int(((sizes - 1) // self.steps).min())

    @property
    def producers(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role is Role.PRODUCES)

    @property
    def consumers(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role is Role.CONSUMES)


@dataclass(frozen=True)
class Frozen:
    """Channels that cannot be removed, and why.

    Attributes:
        reason: one line: the operator, the module in whose forward it runs, and why.
        members: (parameter, axis, number of positions) it touches.
    """

    reason: str
    members: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class AxisSize:
    """The length of an axis of a traced tensor as a function of how many units each group keeps.

    length = fixed + sum(coefficient * kept_units[group] for group, coefficient in terms)
    """

    fixed: float
    terms: tuple[tuple[int, float], ...] = ()

    def length(self, kept: npt.NDArray[np.float64] | IntArray) -> float:
        """Length when group g keeps ``kept[g]`` units."""
        return self.fixed + sum(coefficient * float(kept[group]) for group, coefficient in self.terms)


@dataclass(frozen=True)
class CostTerm:
    """The cost of one traced operator or tensor: constant * product of the lengths of `axes`.

    Attributes:
        kind: ``macs`` (multiply-accumulates of one contraction), ``params`` (elements of one parameter) or
            ``activations`` (elements of one operator's result).
        name: the parameter's name for ``params``; else the path of the module in whose forward it runs.
        operator: the operator's name; empty for ``params``.
        constant: product of all lengths that no group can change.
        axes: the axes that groups can change; empty when the cost is fixed.
    """

    kind: str
    name: str
    operator: str
    constant: float
    axes: tuple[AxisSize, ...] = field(default=())

    def value(self, kept: npt.NDArray[np.float64] | IntArray) -> float:
        """The cost when group g keeps ``kept[g]`` units."""
        result = self.constant
        for axis in self.axes:
            result *= axis.length(kept)
        return result
