"""The table of an analysis: what may be pruned, what it would save, what may not and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from openwork.graph.groups import CostTerm, Frozen, PruneGroup
from openwork.graph.select import channels_per_unit

__all__ = ["Analysed", "analysis_table", "short_count"]


class Analysed(Protocol):
    """What the table reads; analyses of all frameworks have it."""

    @property
    def groups(self) -> tuple[PruneGroup, ...]: ...

    @property
    def frozen(self) -> tuple[Frozen, ...]: ...

    @property
    def costs(self) -> list[CostTerm]: ...

    @property
    def macs(self) -> int: ...

    @property
    def params(self) -> int: ...


def short_count(number: float) -> str:
    """A count in three digits: 1.82 G, 11.7 M, 960."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.0f}"


def _at_stake(analysed: Analysed, kind: str) -> list[float]:
    """Share of the cost that would go if only a group's units went, all of them."""
    terms = [term for term in analysed.costs if term.kind == kind]
    full = np.array([group.units for group in analysed.groups], dtype=np.float64)
    total = sum(term.value(full) for term in terms) or 1.0
    touching: dict[int, list[CostTerm]] = {group.index: [] for group in analysed.groups}
    for term in terms:
        for index in {index for axis in term.axes for index, _ in axis.terms}:
            touching[index].append(term)
    shares = []
    for group in analysed.groups:
        without = full.copy()
        without[group.index] = 0
        shares.append(sum(term.value(full) - term.value(without) for term in touching[group.index]) / total)
    return shares


def _layers(names: Sequence[str], limit: int = 3) -> str:
    unique = list(dict.fromkeys(names))
    shown = ", ".join(unique[:limit])
    return f"{shown} and {len(unique) - limit} more" if len(unique) > limit else shown


def analysis_table(analysed: Analysed, name: str) -> Group:
    """Tables for a terminal.

    Args:
        analysed: the analysis.
        name: name of the model, for the title.
    """
    table = Table(
        title=f"{name}: {short_count(analysed.macs)} MACs, {short_count(analysed.params)} parameters, "
        f"{len(analysed.groups)} group{'' if len(analysed.groups) == 1 else 's'} of channels",
        title_justify="left",
    )
    for column, justify in (("group", "right"), ("channels", "right"), ("produced by", "left")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    table.add_column("layers tied", justify="right")
    table.add_column("MACs at stake", justify="right")
    table.add_column("parameters", justify="right")
    macs, params = _at_stake(analysed, "macs"), _at_stake(analysed, "params")
    for group in analysed.groups:
        per_unit = channels_per_unit(group)
        channels = f"{group.units}" if per_unit == 1 else f"{group.units} x {per_unit}"
        if group.blocks > 1:
            channels += f" in {group.blocks} blocks"
        table.add_row(
            str(group.index),
            channels,
            _layers([member.module for member in group.producers]),
            str(len({member.module for member in group.members})),
            f"{macs[group.index]:.1%}",
            f"{params[group.index]:.1%}",
        )
    parts: list[Table | Text] = [table]
    if analysed.frozen:
        held = Table(title="Not prunable", title_justify="left")
        held.add_column("why", overflow="fold")
        held.add_column("positions", justify="right")
        held.add_column("of", overflow="fold")
        for frozen in analysed.frozen:
            held.add_row(
                frozen.reason,
                str(max((count for _, _, count in frozen.members), default=0)),
                _layers([f"{parameter}[{axis}]" for parameter, axis, _ in frozen.members], 2),
            )
        parts.append(held)
    return Group(*parts)
