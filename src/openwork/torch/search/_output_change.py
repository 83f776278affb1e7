"""The ground truth for small nets: silence each unit by itself and see how far the output moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from openwork.graph.groups import Member, PruneGroup
from openwork.importance import FloatArray
from openwork.torch.search._batches import Batch
from openwork.torch.search._gates import eval_mode
from openwork.torch.search._loss import compute_loss, output_tensor
from openwork.torch.search._sensitivity import DataSensitivity

__all__ = ["OutputChangeSensitivity"]


class OutputChangeSensitivity(DataSensitivity):
    """Mean squared change of the output when what reads a unit's channels reads zero instead.

    One forward pass for each unit and piece: minutes where the others take seconds. It is there to judge the
    others by.

    Args:
        piece: samples in a piece; None: whole batches.
        of: ``output``, or ``loss``: the absolute change of the loss.
    """

    score_order = 2

    def __init__(self, piece: int | None = None, of: str = "output") -> None:
        super().__init__(piece)
        if of not in ("output", "loss"):
            raise ValueError(f"of is {of!r}; allowed: 'output', 'loss'")
        self.of = of

    @torch.no_grad()
    def piece_scores(self, groups: Sequence[PruneGroup], piece: Batch) -> list[FloatArray]:
        """See `DataSensitivity.piece_scores`."""
        tensors: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        with eval_mode(self.model):
            before = self._result(piece, {})
            return [
                np.array([self._change(group, unit, tensors, piece, before) for unit in range(group.units)])
                for group in groups
            ]

    def _change(self, group: PruneGroup, unit: int, tensors: dict[str, Tensor], piece: Batch, before: Tensor) -> float:
        changed: dict[str, Tensor] = {}
        for member in group.consumers or group.members:
            if member.parameter in tensors:
                start = changed.get(member.parameter, tensors[member.parameter])
                changed[member.parameter] = silenced(member, unit, start)
        change = self._result(piece, changed) - before
        return float(change.abs() if self.of == "loss" else change.square().mean())

    def _result(self, piece: Batch, changed: dict[str, Tensor]) -> Tensor:
        if self.of == "loss":
            return compute_loss(_Replaced(self.model, changed), piece, self.loss_function)
        output = functional_call(self.model, changed, piece.inputs.args, piece.inputs.kwargs)
        return output_tensor(output)


class _Replaced(torch.nn.Module):
    """The model with some parameters replaced, as a callable; the model itself is not touched."""

    def __init__(self, model: torch.nn.Module, changed: dict[str, Tensor]) -> None:
        super().__init__()
        self._inner = [model]  # in a list, so that it is no submodule
        self._changed = changed

    def forward(self, *args: object, **kwargs: object) -> object:
        return functional_call(self._inner[0], self._changed, args, kwargs)


def silenced(member: Member, unit: int, tensor: Tensor) -> Tensor:
    """A copy of the member's parameter with zeros at the unit's positions."""
    result = tensor.clone()
    for position in member.positions[member.units == unit].tolist():
        length = tensor.shape[member.axis]
        if length == member.size:
            result.select(member.axis, position).zero_()
        else:  # the inner axis of a grouped convolution
            block, inner = divmod(position, length)
            rows = tensor.shape[0] * length // member.size
            result[block * rows : (block + 1) * rows].select(member.axis, inner).zero_()
    return result
