"""A plan: which positions of which parameters go, and which attributes of the model change with them.

A plan is data. It applies to a fresh model without analysis and loading one executes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from openwork.errors import RecordError, kind_of
from openwork.files import check_paths, read_text, write_text
from openwork.graph.groups import IntArray, PruneGroup, Role
from openwork.indices import format_ranges, parse_ranges

__all__ = ["Cut", "GroupCut", "Plan", "Repair", "given_plan"]

_FORMAT = "openwork-plan"


@dataclass(frozen=True, eq=False)
class Cut:
    """Positions removed from one axis of one parameter or buffer.

    Attributes:
        parameter: qualified name.
        axis: axis of the tensor.
        role: what the axis does with the channel.
        size: length of the channel axis before (of all blocks together, see `blocks`).
        blocks: for the inner axis of a grouped convolution the number of groups; position b * (size / blocks)
            + i is then entry i of the axis in group b. Else 1.
        removed: int64, ascending.
        span: first position of the group on this axis, and one beyond its last (a concatenation is read in
            parts); the whole axis if not given.
        layer: see `openwork.graph.groups.Member`.
    """

    parameter: str
    axis: int
    role: Role
    size: int
    blocks: int
    removed: IntArray
    span: tuple[int, int] = (0, 0)
    layer: str = ""

    @property
    def module(self) -> str:
        """Path of the module (name of the layer) that owns the parameter."""
        return self.layer or self.parameter.rpartition(".")[0]

    def __post_init__(self) -> None:
        if self.span == (0, 0):
            object.__setattr__(self, "span", (0, self.size))

    @property
    def kept(self) -> IntArray:
        mask = np.ones(self.size, dtype=bool)
        mask[self.removed] = False
        return np.flatnonzero(mask)


@dataclass(frozen=True, eq=False)
class GroupCut:
    """What one prune group loses."""

    index: int
    units_before: int
    units_after: int
    blocks: int
    cuts: tuple[Cut, ...]


@dataclass(frozen=True)
class Repair:
    """An attribute that states a size.

    Attributes:
        module: path of the module; empty for the model itself.
        attribute: name; with dots, of what an attribute of the module holds ("config.hidden_size").
        old, new: int, or (nested) list of ints; tuples are stored as lists and restored to the type found.
    """

    module: str
    attribute: str
    old: Any
    new: Any


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Everything that pruning changes."""

    groups: tuple[GroupCut, ...] = ()
    repairs: tuple[Repair, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cuts(self) -> Iterable[Cut]:
        for group in self.groups:
            yield from group.cuts

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.groups)} groups, {len(self.repairs)} attributes>"

    def __str__(self) -> str:
        """A line for each group and each attribute."""
        lines = [repr(self)]
        for group in self.groups:
            layers = dict.fromkeys(cut.layer or cut.parameter.rpartition(".")[0] or cut.parameter for cut in group.cuts)
            names = ", ".join(list(layers)[:4]) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")
            lines.append(f"group {group.index}: {group.units_before} -> {group.units_after} units of {names}")
        for repair in self.repairs:
            place = f"{repair.module}.{repair.attribute}" if repair.module else repair.attribute
            lines.append(f"{place}: {repair.old} -> {repair.new}")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, whole or not at all.

        Raises:
            FileError: the path cannot be written.
        """
        check_paths(path=path)
        content = {
            "format": _FORMAT,
            "version": 1,
            "groups": [
                {
                    "index": group.index,
                    "units": [group.units_before, group.units_after],
                    "blocks": group.blocks,
                    "cuts": [
                        {
                            "parameter": cut.parameter,
                            "axis": cut.axis,
                            "role": cut.role.value,
                            "size": cut.size,
                            "blocks": cut.blocks,
                            "span": list(cut.span),
                            "removed": format_ranges(cut.removed),
                            **({"layer": cut.layer} if cut.layer else {}),
                        }
                        for cut in group.cuts
                    ],
                }
                for group in self.groups
            ],
            "repairs": [[r.module, r.attribute, r.old, r.new] for r in self.repairs],
        }
        write_text(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote. Loading a plan executes nothing.

        Raises:
            FileError: missing, a folder, unreadable.
            RecordError: not a plan, or values out of range.
        """
        check_paths(path=path)
        text = read_text(path, "plan file", limit=1 << 30)
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise RecordError(f"plan file {path} is not JSON: line {error.lineno}: {error.msg}") from error
        except RecursionError:
            raise RecordError(f"plan file {path} is no plan: its lists are nested too deep") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise RecordError(f"plan file {path} has no field format: {_FORMAT!r}; it is not a plan")
        if content.get("version") != 1:
            raise RecordError(f"plan file {path}: version is {content.get('version')!r}; allowed: 1")
        try:
            groups = tuple(
                GroupCut(
                    int(group["index"]),
                    int(group["units"][0]),
                    int(group["units"][1]),
                    int(group["blocks"]),
                    tuple(_cut(cut) for cut in group["cuts"]),
                )
                for group in content["groups"]
            )
            repairs = tuple(Repair(str(m), str(a), old, new) for m, a, old, new in content["repairs"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise RecordError(f"plan file {path} is damaged: {type(error).__name__}: {error}") from error
        return cls(groups, repairs)


def given_plan(plan: Any) -> Plan:
    """The argument ``plan``, if it is a plan.

    Raises:
        RecordError: it is none.
    """
    if not isinstance(plan, Plan):
        raise RecordError(f"plan is {kind_of(plan)}; what prune returned, or PrunePlan.load gives, is needed")
    return plan


def _cut(content: Mapping[str, Any]) -> Cut:
    cut = Cut(
        str(content["parameter"]),
        int(content["axis"]),
        Role(content["role"]),
        int(content["size"]),
        int(content["blocks"]),
        parse_ranges(str(content["removed"]), int(content["size"])),
        (int(content["span"][0]), int(content["span"][1])),
        str(content.get("layer", "")),
    )
    check_cut(cut)
    return cut


def check_cut(cut: Cut) -> None:
    """Raise ValueError unless the removed positions are ascending, in range, and leave something."""
    removed = cut.removed
    where = f"{cut.parameter} axis {cut.axis}"
    if cut.axis < 0 or cut.size < 1 or cut.blocks < 1 or cut.size % cut.blocks:
        raise ValueError(f"{where}: size {cut.size}, blocks {cut.blocks} cannot be")
    if len(removed) and (removed[0] < 0 or removed[-1] >= cut.size or (np.diff(removed) <= 0).any()):
        raise ValueError(f"{where}: removed positions must be ascending, unique and in 0..{cut.size - 1}")
    if len(removed) >= cut.size:
        raise ValueError(f"{where}: all {cut.size} positions are removed; at least one must stay")


def group_cut(group: PruneGroup, removed: IntArray) -> GroupCut:
    """The cuts of one group when the given units go."""
    dead = np.zeros(group.units, dtype=bool)
    dead[removed] = True
    cuts = []
    for member in group.members:
        positions = member.positions[dead[member.units]]
        if len(positions):
            span = int(member.positions[0]), int(member.positions[-1]) + 1
            where = member.parameter, member.axis, member.role, member.size, member.blocks
            cuts.append(Cut(*where, positions, span, member.layer))
    return GroupCut(group.index, group.units, group.units - int(dead.sum()), group.blocks, tuple(cuts))
