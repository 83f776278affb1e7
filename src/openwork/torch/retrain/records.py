"""Between plans and record files, openwork's own and AMCT's."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import nn

from openwork.errors import RecordError, nearest
from openwork.graph.groups import Role
from openwork.graph.plan import Cut, GroupCut, Repair
from openwork.record import (
    ChannelPruneRecord,
    LayerKind,
    PlanCut,
    PlanGroup,
    PlanRepair,
    PruneNode,
    Record,
    decode_plan,
    encode_plan,
)
from openwork.torch.layers import certain_repairs
from openwork.torch.prune import PrunePlan
from openwork.torch.structure import copy_structure, shape_only
from openwork.torch.surgery import cut_tensor

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
        return _plan_of_amct(record, model)
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


def _plan_of_amct(record: Record, model: nn.Module) -> PrunePlan:
    """AMCT names layers only: which axes of which parameters they mean follows from their types."""
    modules = dict(model.named_modules())
    groups = []
    for index, item in enumerate(record.channels):
        where = f"{record.source}: prune_record[{index}]"
        cuts: list[Cut] = []
        known = 0
        for nodes, producing in ((item.producers, True), (item.consumers, False)):
            for node in nodes:
                module = modules.get(node.name)
                if module is None:
                    if "/" in node.name or ("." not in node.name and node.type in ("Add", "Concat", "Relu")):
                        continue  # an operator, not a module
                    if node.type in ("Conv", "Gemm", "MatMul", "ConvTranspose", "BatchNormalization"):
                        raise RecordError(
                            f"{where}: layer {node.name!r} is not in the model; {nearest(node.name, modules)}"
                        )
                    continue
                known += 1
                cuts += _cuts_of_node(node, module, producing, where)
        if not known:
            raise RecordError(f"{where}: none of its layers is in the model (it is of another model)")
        units = item.producers[0].end - item.producers[0].begin
        groups.append(
            GroupCut(
                index,
                units,
                units - len(item.producers[0].prune_index),
                item.producers[0].prune_group or 1,
                tuple(cuts),
            )
        )
    by_parameter: dict[str, list[Cut]] = defaultdict(list)
    for group in groups:
        for cut in group.cuts:
            by_parameter[cut.parameter].append(cut)
    twin = copy_structure(model, lambda name, tensor: cut_tensor(shape_only(tensor), by_parameter.get(name, [])))
    repairs = certain_repairs(twin, {name.rpartition(".")[0] for name in by_parameter})
    return PrunePlan(tuple(groups), tuple(repairs))


def _cuts_of_node(node: PruneNode, module: nn.Module, producing: bool, where: str) -> list[Cut]:
    name, removed = node.name, node.prune_index
    if not len(removed):
        return []

    def vectors(*names: str) -> list[Cut]:
        found = [(n, getattr(module, n, None)) for n in names]
        return [
            Cut(f"{name}.{n}", 0, Role.CARRIES, t.shape[0], 1, removed) for n, t in found if isinstance(t, torch.Tensor)
        ]

    def fits(total: int) -> None:
        if node.end > total:
            raise RecordError(f"{where}: {name!r} has {total} channels; end is {node.end} (it is of another model)")

    if isinstance(module, nn.modules.batchnorm._NormBase):
        fits(module.num_features)
        return vectors("weight", "bias", "running_mean", "running_var")
    if isinstance(module, nn.modules.conv._ConvNd):
        groups, transposed = int(module.groups), bool(module.transposed)  # type: ignore[arg-type]
        into, out = int(module.in_channels), int(module.out_channels)  # type: ignore[arg-type]
        if groups > 1 and groups == into:
            multiplier = out // into
            fits(into if not producing else out)
            rows = (
                removed
                if producing or multiplier == 1
                else (removed[:, None] * multiplier + np.arange(multiplier)).ravel()
            )
            cuts = [Cut(f"{name}.weight", 0, Role.CARRIES, module.weight.shape[0], 1, removed if transposed else rows)]
            if module.bias is not None:
                cuts.append(Cut(f"{name}.bias", 0, Role.CARRIES, out, 1, rows))
            return cuts
        fits(out if producing else into)
        inner = producing == transposed
        size = (out if producing else into) if inner else module.weight.shape[0]
        role = Role.PRODUCES if producing else Role.CONSUMES
        cuts = [Cut(f"{name}.weight", 1 if inner else 0, role, size, groups if inner else 1, removed)]
        return cuts + (vectors("bias") if producing else [])
    if isinstance(module, nn.Linear):
        if producing:
            fits(module.out_features)
            return [Cut(f"{name}.weight", 0, Role.PRODUCES, module.out_features, 1, removed), *vectors("bias")]
        # After a flatten every channel stands for several consecutive inputs; AMCT counts channels.
        times = module.in_features // node.end if node.begin == 0 and module.in_features % node.end == 0 else 1
        fits(module.in_features)
        if times > 1:
            removed = (removed[:, None] * times + np.arange(times)).ravel()
        return [Cut(f"{name}.weight", 1, Role.CONSUMES, module.in_features, 1, removed)]
    raise RecordError(
        f"{where}: {name!r} is a {type(module).__name__}; a record of AMCT prunes convolutions, "
        "linear layers and batch norms"
    )
