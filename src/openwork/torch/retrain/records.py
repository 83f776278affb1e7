"""Between plans and record files, openwork's own and AMCT's."""

from __future__ import annotations

import numpy as np
from torch import nn

from openwork.graph.groups import Role
from openwork.graph.plan import Cut, GroupCut, Repair
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
from openwork.torch.prune import PrunePlan
from openwork.torch.retrain.amct_records import plan_of_amct

__all__ = ["plan_from_record", "records_from_plan"]


def layer_kinds(model: nn.Module) -> dict[str, LayerKind]:
    """What each module is to AMCT."""
    kinds = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            transposed = bool(module.transposed)
            kinds[name] = LayerKind("ConvTranspose" if transposed else "Conv", int(module.groups))  # type: ignore[arg-type]
        elif isinstance(module, nn.Linear):
            kinds[name] = LayerKind("MatMul" if module.bias is None else "Gemm")
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            kinds[name] = LayerKind("BatchNormalization")
    return kinds


def records_from_plan(plan: PrunePlan, model: nn.Module) -> list[ChannelPruneRecord]:
    """One record for each group, readable by AMCT, with the whole plan beside.

    Args:
        plan: the plan.
        model: the unpruned model.
    """
    groups = [
        PlanGroup(
            group.index,
            group.units_before,
            group.units_after,
            [
                PlanCut(cut.parameter, cut.axis, cut.role.value, cut.size, cut.blocks, cut.removed, *cut.span)
                for cut in group.cuts
            ],
            group.blocks,
        )
        for group in plan.groups
    ]
    repairs = [PlanRepair(item.module, item.attribute, item.old, item.new) for item in plan.repairs]
    return encode_plan(groups, repairs, layer_kinds(model))


def plan_from_record(record: Record, model: nn.Module) -> PrunePlan:
    """The plan that a record states, without analysis.

    Args:
        record: a record that openwork or AMCT wrote.
        model: the unpruned model.

    Raises:
        RecordError: the record is of another model, or damaged.
    """
    decoded = decode_plan(record.channels, record.source)
    if decoded is None:
        return plan_of_amct(record, model)
    groups, repairs = decoded
    return PrunePlan(
        tuple(
            GroupCut(
                group.index,
                group.units_before,
                group.units_after,
                group.blocks,
                tuple(
                    Cut(
                        cut.parameter,
                        cut.axis,
                        Role(cut.role),
                        cut.size,
                        cut.blocks,
                        np.asarray(cut.removed, dtype=np.int64),
                        (cut.begin, cut.size if cut.end is None else cut.end),
                    )
                    for cut in (c if isinstance(c, PlanCut) else PlanCut(*c) for c in group.cuts)
                ),
            )
            for group in groups
        ),
        tuple(Repair(item.module, item.attribute, item.old, item.new) for item in repairs),
    )
