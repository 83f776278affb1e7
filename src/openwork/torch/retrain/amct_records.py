"""Records that AMCT wrote: they name layers, and what that means for parameters follows from the layers' types."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import nn

from openwork.errors import RecordError, nearest
from openwork.graph.groups import IntArray, Role
from openwork.graph.plan import Cut, GroupCut
from openwork.record import PruneNode, Record
from openwork.torch.layers import certain_repairs, cut_shapes
from openwork.torch.prune import PrunePlan

__all__ = ["plan_of_amct"]

# Types of nodes that are layers with weights; all others are operators.
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization")


def plan_of_amct(record: Record, model: nn.Module) -> PrunePlan:
    """The plan of a record without openwork's own attributes.

    Args:
        record: the record.
        model: the unpruned model.

    Raises:
        RecordError: a layer is missing, is of another kind, or has fewer channels: the record is of another model.
    """
    modules = dict(model.named_modules())
    widths: dict[str, int] = defaultdict(int)
    for item in record.channels:
        for node in item.consumers:
            widths[node.name] = max(widths[node.name], node.end)
    groups = []
    for index, item in enumerate(record.channels):
        where = f"{record.source}: prune_record[{index}]"
        cuts: list[Cut] = []
        known = 0
        for nodes, producing in ((item.producers, True), (item.consumers, False)):
            for node in nodes:
                module = modules.get(node.name)
                if module is None:
                    if node.type in _LAYERS and "/" not in node.name:
                        near = nearest(node.name, [name for name in modules if name])
                        raise RecordError(f"{where}: layer {node.name!r} is not in the model; {near}")
                    continue  # an operator, not a module
                known += 1
                if len(node.prune_index):
                    cuts += _cuts_of_node(_Node(node, module, producing, widths[node.name], where))
        if not known:
            raise RecordError(f"{where}: none of its layers is in the model (it is of another model)")
        first = item.producers[0]
        units = first.end - first.begin
        groups.append(GroupCut(index, units, first.kept, first.prune_group or 1, tuple(cuts)))
    by_parameter: dict[str, list[Cut]] = defaultdict(list)
    for group in groups:
        for cut in group.cuts:
            by_parameter[cut.parameter].append(cut)
    repairs = certain_repairs(model, cut_shapes(model, by_parameter))
    return PrunePlan(tuple(groups), tuple(repairs))


class _Node:
    """One node of a record with the module that it names."""

    def __init__(self, node: PruneNode, module: nn.Module, producing: bool, width: int, where: str) -> None:
        self.name, self.removed, self.module, self.producing = node.name, node.prune_index, module, producing
        self.end, self.width, self.where = node.end, width, where

    def fail(self, words: str) -> RecordError:
        return RecordError(f"{self.where}: {self.name!r} {words} (it is of another model)")

    def check(self, total: int) -> None:
        if self.end > total:
            raise self.fail(f"has {total} channels; end is {self.end}")

    def spread(self, total: int) -> IntArray:
        """Removed positions among `total`: after a flatten each channel stands for several consecutive inputs.

        AMCT counts channels, of all branches of a concatenation together.
        """
        self.check(total)
        if self.producing or total % self.width:
            return self.removed
        return repeated(self.removed, total // self.width)

    def vectors(self, positions: IntArray, *names: str) -> list[Cut]:
        found = [(name, getattr(self.module, name, None)) for name in names]
        return [
            Cut(f"{self.name}.{name}", 0, Role.CARRIES, tensor.shape[0], 1, positions)
            for name, tensor in found
            if isinstance(tensor, torch.Tensor)
        ]


def repeated(positions: IntArray, times: int) -> IntArray:
    """Positions when each becomes `times` consecutive ones."""
    return (positions[:, None] * times + np.arange(times)).ravel()


def _cuts_of_node(node: _Node) -> list[Cut]:
    module = node.module
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return node.vectors(node.spread(module.num_features), "weight", "bias", "running_mean", "running_var")
    if isinstance(module, nn.modules.conv._ConvNd):
        return _cuts_of_convolution(node, module)
    if isinstance(module, nn.Linear):
        if node.producing:
            node.check(module.out_features)
            cut = Cut(f"{node.name}.weight", 0, Role.PRODUCES, module.out_features, 1, node.removed)
            return [cut, *node.vectors(node.removed, "bias")]
        into = module.in_features
        return [Cut(f"{node.name}.weight", 1, Role.CONSUMES, into, 1, node.spread(into))]
    if isinstance(module, nn.PReLU):
        return node.vectors(node.removed, "weight") if module.num_parameters > 1 else []
    if not any(True for _ in (*module.parameters(), *module.buffers())):
        return []  # an activation, pooling
    raise node.fail(
        f"is a {type(module).__name__}; a record of AMCT prunes convolutions, linear layers and batch norms"
    )


def _cuts_of_convolution(node: _Node, module: nn.modules.conv._ConvNd) -> list[Cut]:
    groups, transposed = int(module.groups), bool(module.transposed)  # type: ignore[arg-type]
    into, out = int(module.in_channels), int(module.out_channels)  # type: ignore[arg-type]
    name, removed = node.name, node.removed
    node.check(out if node.producing else into)
    if groups > 1 and groups == into:
        # Each input channel has its own filters, and they go with it.
        rows = removed if node.producing else repeated(removed, out // into)
        filters = removed if transposed else rows
        cut = Cut(f"{name}.weight", 0, Role.CARRIES, module.weight.shape[0], 1, filters)
        return [cut, *node.vectors(rows, "bias")]
    inner = node.producing == transposed
    size = (out if node.producing else into) if inner else module.weight.shape[0]
    role = Role.PRODUCES if node.producing else Role.CONSUMES
    cut = Cut(f"{name}.weight", 1 if inner else 0, role, size, groups if inner else 1, removed)
    return [cut, *(node.vectors(removed, "bias") if node.producing else [])]
