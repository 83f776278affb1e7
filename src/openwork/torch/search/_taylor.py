"""First-order Taylor sensitivity: |sum of weight * gradient| of each unit in each parameter, summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
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
            products = {name: parameters[name].detach() * gradient for name, gradient in found.items()}
        scores = []
        for group in groups:
            total = np.zeros(group.units)
            for member in group.members:
                if member.parameter in products:
                    channels = channel_sums(member, products[member.parameter])
                    total += np.abs(unit_sums(member, channels, group.units))
            scores.append(total)
        return scores


def channel_sums(member: Member, values: Tensor) -> FloatArray:
    """As `openwork.importance`'s, on a tensor: float64 [member.size]."""
    length = values.shape[member.axis]
    if length == member.size:
        axes = [axis for axis in range(values.ndim) if axis != member.axis]
        sums = values.sum(axes) if axes else values
    else:  # the inner axis of a grouped convolution: one block of channels after another along axis 0
        blocks = member.size // length
        rows = values.reshape(blocks, values.shape[0] // blocks, *values.shape[1:])
        axes = [axis for axis in range(rows.ndim) if axis not in (0, member.axis + 1)]
        sums = rows.sum(axes).flatten()
    return np.asarray(sums.double().cpu().numpy())
