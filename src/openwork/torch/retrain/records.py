"""Between plans and record files, openwork's own and AMCT's."""

from __future__ import annotations

from torch import nn

from openwork.errors import RecordError
from openwork.record import ChannelPruneRecord, LayerKind, Record
from openwork.retrain.records import plan_in_record, plan_records
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
    return plan_records(plan, layer_kinds(model))


def plan_from_record(record: Record, model: nn.Module) -> PrunePlan:
    """The plan that a record states, without analysis.

    Args:
        record: a record that openwork or AMCT wrote.
        model: the unpruned model.

    Raises:
        RecordError: the record is of another model, or damaged.
    """
    found = plan_in_record(record)
    if found is None:
        return plan_of_amct(record, model)
    plan = PrunePlan(*found)
    for written, stated in zip(record.channels, records_from_plan(plan, model)):
        for node, expected in zip(written.nodes, stated.nodes):
            if (node.name, node.begin, node.end, list(node.prune_index)) != (
                expected.name,
                expected.begin,
                expected.end,
                list(expected.prune_index),
            ):
                raise RecordError(
                    f"{record.source}: begin, end or prune_index of {node.name!r} differ from what the record's plan "
                    f"says of {expected.name!r} ({expected.begin}..{expected.end}); a record is not edited by hand"
                )
    return plan
