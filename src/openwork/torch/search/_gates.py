"""What the loss would lose with each unit, from gradients.

Put a gate z = 1 on a unit's channel where it is read. Then dloss/dz = sum of activation * dloss/dactivation, and
to first order the unit is worth |dloss/dz|, to second order (Fisher) half its square, sample by sample. One
backward pass of the whole batch gives the gates of every sample at once, because in eval mode the samples do not
meet. Where a channel is read by something that is no module with one input (a fused attention's packed weight,
say), the sum of weight * gradient over the reading weights is the same number summed over the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from openwork.errors import WeightsError
from openwork.graph.groups import Member, PruneGroup
from openwork.importance import FloatArray
from openwork.importance._base import unit_sums
from openwork.retrain.sensitivity import readers_of
from openwork.torch.search._batches import Batch
from openwork.torch.search._loss import compute_loss
from openwork.torch.search._sensitivity import DataSensitivity

__all__ = ["GateSensitivity", "eval_mode", "learning"]


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; every module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def learning(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """All floating-point parameters by name, asking for gradients inside, as they were afterwards."""
    named = model.named_parameters(remove_duplicate=False)
    parameters: dict[str, Tensor] = {name: tensor for name, tensor in named if tensor.is_floating_point()}
    flags = {name: parameter.requires_grad for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield parameters
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(flags[name])


class GateSensitivity(DataSensitivity):
    """A sensitivity made of the slopes of the loss by gates, sample by sample.

    Args:
        piece: samples in a piece, for batches that need too much memory; None: whole batches, or 32 pieces of each
            where the samples of some layer cannot be told apart.
    """

    many_pieces: ClassVar[int] = 32

    def scores(self, groups: Sequence[PruneGroup]) -> list[FloatArray]:
        """See `DataSensitivity.scores`."""
        readers = _readers(self.model, groups)
        apart = all(member.parameter in readers for group in groups for member in readers_of(group))
        self.pieces_per_batch = 1 if apart else self.many_pieces
        return super().scores(groups)

    def slopes(self, groups: Sequence[PruneGroup], piece: Batch) -> list[FloatArray]:
        """Slope of each sample's loss by a gate on each unit where it is read: float64 [samples, units] for each group.

        The slopes of all layers that read a unit are summed. A group that nothing reads has its gates where it is made.

        Raises:
            WeightsError: a gradient is NaN or infinite; the parameter is named.
        """
        count = piece.samples
        readers = _readers(self.model, groups)
        with eval_mode(self.model), learning(self.model) as parameters, _watch(readers.values()):
            loss = compute_loss(self.model, piece, self.loss_function) * count
            seen = [value for reader in readers.values() for value in reader.inputs]
            # Those of all members, not only of what reads: a NaN anywhere in the group is to be found here.
            members = [member.parameter for group in groups for member in group.members]
            names = [name for name in dict.fromkeys(members) if name in parameters]
            found = torch.autograd.grad(loss, [*seen, *(parameters[name] for name in names)], allow_unused=True)
        gates: dict[str, FloatArray] = {}
        place = 0
        for name, reader in readers.items():
            taken = found[place : place + len(reader.inputs)]
            place += len(reader.inputs)
            result = reader.samples(taken, count)
            if result is not None:
                gates[name] = np.asarray(result.cpu().numpy())
        others = {member.parameter for group in groups for member in readers_of(group)} - set(readers)
        products: dict[str, Tensor] = {}
        for name, gradient in zip(names, found[len(seen) :], strict=True):
            if gradient is None:
                continue
            if not torch.isfinite(gradient.sum()) and not torch.isfinite(gradient).all():
                raise WeightsError(f"gradient of {name} is NaN or infinite on input_data")
            if name in others:
                products[name] = parameters[name].detach() * gradient
        return [_unit_slopes(group, gates, products, count) for group in groups]


def _readers(model: nn.Module, groups: Sequence[PruneGroup]) -> dict[str, _Reader]:
    """Modules that read channels of the groups through their one input, by the weight that reads."""
    modules = dict(model.named_modules())
    readers: dict[str, _Reader] = {}
    for member in (member for group in groups for member in group.consumers):
        module = modules.get(member.module)
        if member.parameter in readers or not member.parameter.endswith("weight"):
            continue
        if isinstance(module, nn.modules.conv._ConvNd) and module.in_channels == member.size:
            readers[member.parameter] = _Reader(module, 1)
        elif isinstance(module, nn.Linear) and module.in_features == member.size and member.axis == 1:
            readers[member.parameter] = _Reader(module, -1)
    return readers


def _unit_slopes(
    group: PruneGroup, gates: dict[str, FloatArray], products: dict[str, Tensor], count: int
) -> FloatArray:
    """float64 [samples, units] from channels' slopes by the weights that read them, or weight * gradient."""
    total: FloatArray = np.zeros((count, group.units))
    for member in readers_of(group):
        if member.parameter in gates:
            rows = gates[member.parameter][:, member.positions]
            index = np.arange(count)[:, None] * group.units + member.units
            total += np.bincount(index.ravel(), rows.ravel(), count * group.units).reshape(count, -1)
        elif member.parameter in products:
            channels = _channel_sums(member, products[member.parameter])
            # Samples that cannot be told apart are taken as independent: variance divides by their number.
            total += unit_sums(member, channels, group.units) / count**0.5
    return total


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


@contextlib.contextmanager
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


def _channel_sums(member: Member, values: Tensor) -> FloatArray:
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
