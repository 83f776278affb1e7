"""Fisher sensitivity: the mean over samples of (dloss/dgate)^2, a gate standing where a channel is read.

dloss/dgate = sum of activation * dloss/dactivation over the positions of the unit, which is also the sum of
weight * gradient over the weights that read it. In eval mode the samples of a batch do not meet, so one backward
pass gives the gates of every sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from openwork.errors import WeightsError
from openwork.graph.groups import PruneGroup
from openwork.importance import FloatArray
from openwork.importance._base import unit_sums
from openwork.retrain.sensitivity import readers_of
from openwork.torch.search._batches import Batch
from openwork.torch.search._gates import eval_mode, learning
from openwork.torch.search._loss import compute_loss
from openwork.torch.search._sensitivity import DataSensitivity
from openwork.torch.search._taylor import channel_sums

__all__ = ["FisherSensitivity"]


@dataclass
class _Reader:
    """A module whose input carries channels along one axis."""

    module: nn.Module
    axis: int
    inputs: list[Tensor] = field(default_factory=list)

    def samples(self, gradient: Sequence[Tensor | None], count: int) -> Tensor | None:
        """Sum over positions of input * gradient: float64 [count, channels]; None if nothing came back."""
        total: Tensor | None = None
        for value, slope in zip(self.inputs, gradient, strict=True):
            if slope is None:
                continue
            product = (value.detach() * slope).movedim(self.axis, -1)
            # An input whose first axis is no multiple of the batch (tokens first, say) counts as one sample.
            rows = count if product.shape[0] % count == 0 else 1
            gates = product.reshape(rows, -1, product.shape[-1]).sum(1).double()
            if rows == 1 and count > 1:
                gates = gates.expand(count, -1) / count**0.5
            total = gates if total is None else total + gates
        return total


class FisherSensitivity(DataSensitivity):
    """Mean over samples of the squared slope of the loss by each unit's gate.

    After Theis et al., "Faster gaze prediction with dense networks and Fisher pruning" (2018), and Liu et al.,
    "Group Fisher Pruning for Practical Network Compression" (2021): the slopes of all layers that read a channel
    are summed before they are squared. It estimates the second-order loss; at a minimum the first order is 0.

    Args:
        piece: samples in a piece; None: whole batches.
        power: 2; 1 gives the mean absolute slope, a first-order score, and `score_order` is 1.
    """

    def __init__(self, piece: int | None = None, power: float = 2.0) -> None:
        super().__init__(piece)
        self.power = power
        self.score_order = 2 if power >= 2 else 1

    def piece_scores(self, groups: Sequence[PruneGroup], piece: Batch) -> list[FloatArray]:
        """See `DataSensitivity.piece_scores`."""
        count = piece.samples
        readers = self._readers(groups)
        others = [
            member.parameter for group in groups for member in readers_of(group) if member.parameter not in readers
        ]
        with eval_mode(self.model), learning(self.model) as parameters, _watch(readers.values()):
            loss = compute_loss(self.model, piece, self.loss_function) * count
            seen = [(reader, value) for reader in readers.values() for value in reader.inputs]
            names = [name for name in dict.fromkeys(others) if name in parameters]
            found = torch.autograd.grad(
                loss, [*(value for _, value in seen), *(parameters[name] for name in names)], allow_unused=True
            )
        slopes: dict[str, Tensor | None] = dict(zip(names, found[len(seen) :], strict=True))
        gates: dict[str, np.ndarray] = {}
        place = 0
        for name, reader in readers.items():
            taken = found[place : place + len(reader.inputs)]
            place += len(reader.inputs)
            result = reader.samples(taken, count)
            if result is not None:
                if not torch.isfinite(result).all():
                    raise WeightsError(f"the gradient at the input of {name} is NaN or infinite on input_data")
                gates[name] = result.cpu().numpy()
        return [self._score(group, gates, parameters, slopes, count) for group in groups]

    def _readers(self, groups: Sequence[PruneGroup]) -> dict[str, _Reader]:
        """Modules that read channels of the groups through their one input, by the weight that reads."""
        modules = dict(self.model.named_modules())
        readers = {}
        for member in (member for group in groups for member in group.consumers):
            module = modules.get(member.module)
            if member.parameter in readers or not member.parameter.endswith("weight"):
                continue
            if isinstance(module, nn.modules.conv._ConvNd) and module.in_channels == member.size:
                readers[member.parameter] = _Reader(module, 1)
            elif isinstance(module, nn.Linear) and module.in_features == member.size and member.axis == 1:
                readers[member.parameter] = _Reader(module, -1)
        return readers

    def _score(
        self,
        group: PruneGroup,
        gates: dict[str, np.ndarray],
        parameters: dict[str, Tensor],
        slopes: dict[str, Tensor | None],
        count: int,
    ) -> FloatArray:
        total = np.zeros((count, group.units))
        for member in readers_of(group):
            if member.parameter in gates:
                rows = gates[member.parameter][:, member.positions]
                index = np.arange(count)[:, None] * group.units + member.units
                total += np.bincount(index.ravel(), rows.ravel(), count * group.units).reshape(count, -1)
            elif slopes.get(member.parameter) is not None:
                slope = slopes[member.parameter]
                assert slope is not None
                channels = channel_sums(member, parameters[member.parameter].detach() * slope)
                # Samples that cannot be told apart are taken as independent: variance divides by their number.
                total += unit_sums(member, channels, group.units) / count**0.5
        scores: FloatArray = np.mean(np.abs(total) ** self.power, axis=0)
        return scores


@contextmanager
def _watch(readers: Iterable[_Reader]) -> Iterator[None]:
    """Note the inputs of the readers' modules while a forward runs.

    Each module reads a view of its own, so that the slope at its input comes through this module alone, not
    through a residual connection beside it.
    """
    handles = []
    for reader in readers:

        def note(module: nn.Module, arguments: tuple[Any, ...], reader: _Reader = reader) -> tuple[Any, ...] | None:
            if not arguments or not isinstance(arguments[0], Tensor) or not arguments[0].requires_grad:
                return None
            own = arguments[0].view_as(arguments[0])
            reader.inputs.append(own)
            return (own, *arguments[1:])

        handles.append(reader.module.register_forward_pre_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
