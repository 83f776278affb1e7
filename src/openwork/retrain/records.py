"""Between plans and record files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from openwork.graph.groups import Role
from openwork.graph.plan import Cut, GroupCut, Plan, Repair
from openwork.record import (
    ChannelPruneRecord,
    LayerKind,
    PlanCut,
    PlanGroup,
    PlanRepair,
    Record,
    decode_plan,
    encode_plan,
)

__all__ = ["plan_in_record", "plan_records"]


def plan_records(plan: Plan, kinds: Mapping[str, LayerKind]) -> list[ChannelPruneRecord]:
    """One record for each group, readable by AMCT, with the whole plan beside.

    Args:
        plan: the plan.
        kinds: what each layer is to AMCT.
    """
    groups = [
        PlanGroup(
            group.index,
            group.units_before,
            group.units_after,
            [
                PlanCut(
                    cut.parameter, cut.axis, cut.role.value, cut.size, cut.blocks, cut.removed, *cut.span, cut.layer
                )
                for cut in group.cuts
            ],
            group.blocks,
        )
        for group in plan.groups
    ]
    repairs = [PlanRepair(item.module, item.attribute, item.old, item.new) for item in plan.repairs]
    return encode_plan(groups, repairs, kinds)


def plan_in_record(record: Record) -> tuple[tuple[GroupCut, ...], tuple[Repair, ...]] | None:
    """The plan that a record states; None if AMCT wrote it.

    Raises:
        RecordError: the record is damaged.
    """
    decoded = decode_plan(record.channels, record.source)
    if decoded is None:
        return None
    groups, repairs = decoded
    return (
        tuple(
            GroupCut(group.index, group.units_before, group.units_after, group.blocks, _cuts(group.cuts))
            for group in groups
        ),
        tuple(Repair(item.module, item.attribute, item.old, item.new) for item in repairs),
    )


def _cuts(cuts: Sequence[PlanCut | tuple[object, ...]]) -> tuple[Cut, ...]:
    return tuple(
        Cut(
            cut.parameter,
            cut.axis,
            Role(cut.role),
            cut.size,
            cut.blocks,
            np.asarray(cut.removed, dtype=np.int64),
            (cut.begin, cut.size if cut.end is None else cut.end),
            cut.layer,
        )
        for cut in (c if isinstance(c, PlanCut) else PlanCut(*c) for c in cuts)  # type: ignore[arg-type]
    )
