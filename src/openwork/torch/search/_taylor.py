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
from openwork.retrain.sensitivity import readers_of
from openwork.torch.search._batches import Batch, device_of
from openwork.torch.search._distributed import sum_over_ranks
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

    The sum over members tells layers apart, single channels less so: it counts a channel once for its filter and
    again for the norm's weight and bias. So which channels of a layer go, `rankings`, is the mean square of the slope
    by a gate where the channel is read, from the same gradients.

    Args:
        piece: samples in a piece; None: each batch is cut into 32.
    """

    pieces_per_batch: ClassVar[int] = 32

    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """See `DataSensitivity.scores`; sets `rankings`."""
        self._squares = [np.zeros(group.units) for group in groups]
        scores = super().scores(groups)
        self.rankings = sum_over_ranks(self._squares, device_of(self.model))
        return scores

    def piece_scores(self, groups: Sequence[PruneGroup], piece: Batch) -> list[FloatArray]:
        """See `DataSensitivity.piece_scores`."""
        wanted = [member.parameter for group in groups for member in group.members]
        with eval_mode(self.model), learning(self.model) as parameters:
            found = gradients(compute_loss(self.model, piece, self.loss_function), parameters, wanted)
        uses: dict[str, list[tuple[int, Member, bool]]] = {}
        for number, group in enumerate(groups):
            reading = {id(member) for member in readers_of(group)}
            for member in group.members:
                uses.setdefault(member.parameter, []).append((number, member, id(member) in reading))
        scores = [np.zeros(group.units) for group in groups]
        slopes = [np.zeros(group.units) for group in groups]
        with torch.no_grad():
            # One product at a time, in memory that is used again: new memory for all of them costs more than the sums.
            scratch = Scratch()
            for name, gradient in found.items():
                product = scratch.product(parameters[name].detach(), gradient)
                for number, member, reads in uses[name]:
                    sums = unit_sums(member, channel_sums(member, product), groups[number].units)
                    scores[number] += np.abs(sums)
                    if reads:
                        slopes[number] += sums
        for squares, slope in zip(self._squares, slopes, strict=True):
            squares += slope**2
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
