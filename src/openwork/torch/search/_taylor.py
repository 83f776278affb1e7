"""First-order Taylor sensitivity: |sum of weight * gradient| of each unit in each parameter, summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from openwork.graph.groups import Member, PruneGroup
from openwork.importance import FloatArray
from openwork.importance._base import unit_sums
from openwork.torch.search._batches import Batch
from openwork.torch.search._gates import eval_mode, gradients, learning
from openwork.torch.search._loss import compute_loss
from openwork.torch.search._sensitivity import DataSensitivity

__all__ = ["TaylorLossSensitivity"]


class TaylorLossSensitivity(DataSensitivity):
    """|w.g| per channel, summed over all members of the group, averaged over the pieces of the batches.

    Everything that goes with a channel counts: the weights that make it, that carry it (norms, biases,
    depthwise filters) and that read it. After Molchanov et al., "Importance Estimation for Neural Network
    Pruning" (2019). Gradients are those of one piece of a batch, in eval mode: in the gradient of a large batch
    the samples cancel each other, in a well-trained net to next to nothing, and what is left is noise.

    Args:
        piece: samples in a piece; None: each batch is cut into 32.
    """

    pieces_per_batch: ClassVar[int] = 32

    def piece_scores(self, groups: Sequence[PruneGroup], piece: Batch) -> list[FloatArray]:
        """See `DataSensitivity.piece_scores`."""
        wanted = [member.parameter for group in groups for member in group.members]
        with eval_mode(self.model), learning(self.model) as parameters:
            found = gradients(compute_loss(self.model, piece, self.loss_function), parameters, wanted)
        readers: dict[str, list[tuple[int, Member]]] = {}
        for number, group in enumerate(groups):
            for member in group.members:
                readers.setdefault(member.parameter, []).append((number, member))
        scores = [np.zeros(group.units) for group in groups]
        with torch.no_grad():
            # One product at a time, in memory that is used again: new memory for all of them costs more than the sums.
            scratch = Scratch()
            for name, gradient in found.items():
                product = scratch.product(parameters[name].detach(), gradient)
                for number, member in readers[name]:
                    channels = channel_sums(member, product)
                    scores[number] += np.abs(unit_sums(member, channels, groups[number].units))
        return scores


class Scratch:
    """Memory for products of weight and gradient, one at a time."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def product(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """``weight * gradient``; overwritten by the next call."""
        kind = (torch.result_type(weight, gradient), weight.device)
        memory = self._memory.get(kind)
        if memory is None or memory.numel() < weight.numel():
            memory = self._memory[kind] = torch.empty(weight.numel(), dtype=kind[0], device=kind[1])
        return torch.mul(weight, gradient, out=memory[: weight.numel()].view(weight.shape))


def channel_sums(member: Member, values: Tensor) -> FloatArray:
    """As `openwork.importance`'s, on a tensor: float64 [member.size]."""
    length = values.shape[member.axis]
    if length == member.size:
        # Whole slices are added first: a sum over outer and inner axes at once is several times slower.
        outer = list(range(member.axis))
        sums = (values.sum(outer) if outer else values).reshape(member.size, -1).sum(1)
    else:  # the inner axis of a grouped convolution: one block of channels after another along axis 0
        blocks = member.size // length
        rows = values.reshape(blocks, values.shape[0] // blocks, *values.shape[1:])
        axes = [axis for axis in range(rows.ndim) if axis not in (0, member.axis + 1)]
        sums = rows.sum(axes).flatten()
    return np.asarray(sums.double().cpu().numpy())
