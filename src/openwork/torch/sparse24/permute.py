"""Reorder channels throughout a model, so that 2:4 masks keep more magnitude and the function stays.

The engine's groups say which channels are interchangeable and every place where each of them is held: reordering
the units of a group in all of these places at once changes nothing that the model computes. That is then checked
on the model itself; a group whose reordering shows in the output is put back, with the reason.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from openwork.graph.groups import IntArray, Member, PruneGroup, Role
from openwork.sparsity.permutation import search_permutation
from openwork.torch.analysis import _analyze
from openwork.torch.sparse24.layers import kind_of
from openwork.torch.structure import Inputs, bind_inputs

__all__ = ["GroupPermutation", "PermutationReport", "permute_channels"]

_LOG = logging.getLogger("openwork")
_TOLERANCE = 1e-5
_SECONDS = 20.0


@dataclass(frozen=True)
class GroupPermutation:
    """What became of one group of channels.

    Attributes:
        layers: masked layers that read the channels.
        units: number of channels.
        before, after: magnitude that 2:4 masks of these layers keep.
        reason: why the order was left as it was; empty if it was changed.
    """

    layers: tuple[str, ...]
    units: int
    before: float = 0.0
    after: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class PermutationReport:
    """All groups that feed a masked layer, and masked layers that no group feeds."""

    groups: tuple[GroupPermutation, ...]
    skipped: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = []
        for group in self.groups:
            text = group.reason or f"keeps {group.after / group.before - 1:+.2%} more magnitude"
            lines.append(f"{', '.join(group.layers)}: {group.units} channels: {text}")
        lines += [f"{layer}: {reason}" for layer, reason in self.skipped]
        return "\n".join(lines)


class _Impossible(Exception):
    """A group cannot be reordered; the message says why."""


def permute_channels(
    model: nn.Module, inputs: Any, layers: Collection[str], seconds: float = _SECONDS
) -> PermutationReport:
    """Reorder channels of a model, in place, for 2:4 masks on some of its layers.

    Args:
        model: the model; its parameters and buffers are reordered.
        inputs: what forward takes; the model runs on it to check that its outputs stay.
        layers: names of the layers that will be masked 2:4.
        seconds: time for the search over all groups together.

    Returns:
        What was done, group by group.

    Raises:
        ModelError: the forward fails.
    """
    analysis = _analyze(model, inputs)
    analysis.check()
    bound = bind_inputs(inputs)
    wanted = set(layers)
    candidates = [(group, _readers(group, wanted, model)) for group in analysis.groups]
    candidates = [(group, readers) for group, readers in candidates if readers]
    results = []
    twin, bound = _double(model, bound)
    expected = _outputs(twin, bound)
    tensors, trial = _tensors_of(model), _tensors_of(twin)
    for group, readers in _progress(candidates):
        names = tuple(dict.fromkeys(member.module for member in readers))
        before = after = 0.0
        reason = ""
        try:
            sources, before, after = _search(group, readers, tensors, seconds / len(candidates))
            if after <= before * (1 + 1e-6):
                raise _Impossible("no better order was found")
            undo = _apply(group, sources, trial)
            error = _difference(expected, _outputs(twin, bound))
            if not error <= _TOLERANCE:
                _restore(trial, undo)
                raise _Impossible(f"the order of these channels shows in the model's output (by {error:.1e})")
            _apply(group, sources, tensors)
        except _Impossible as impossible:
            reason, after = str(impossible), before
        results.append(GroupPermutation(names, group.units, before, after, reason))
    reached = {name for result in results for name in result.layers}
    skipped = tuple((name, "its input channels are not free to move") for name in layers if name not in reached)
    report = PermutationReport(tuple(results), skipped)
    _LOG.info("channel order for 2:4 masks:\n%s", report)
    return report


def _progress(items: Sequence[Any]) -> Iterable[Any]:
    """A progress bar, if anybody is watching."""
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, "channel order", console=Console(stderr=True))


def _readers(group: PruneGroup, wanted: Collection[str], model: nn.Module) -> list[Member]:
    """Members that are the input axis of a masked layer."""
    found = []
    for member in group.members:
        if member.role is Role.CONSUMES and member.module in wanted and member.parameter.endswith(".weight"):
            kind = kind_of(model.get_submodule(member.module))
            if kind is not None and kind.axis == member.axis:
                found.append(member)
    return found


def _places(member: Member, units: int) -> IntArray:
    """[units, multiplicity]: the positions of each unit, ascending."""
    counts = np.bincount(member.units, minlength=units)
    if counts.min() != counts.max():
        raise _Impossible(f"{member.parameter} holds its channels in unequal numbers")
    order = np.argsort(member.units, kind="stable")
    return member.positions[order].reshape(units, -1)


def _search(
    group: PruneGroup, readers: Sequence[Member], tensors: dict[str, Tensor], seconds: float
) -> tuple[IntArray, float, float]:
    """For each unit the unit that takes its place, and the magnitude kept before and after."""
    sources = np.arange(group.units)
    before = after = 0.0
    tried = 0
    for block in range(group.blocks):
        units = np.flatnonzero(group.block_of == block)
        rows: list[np.ndarray] = []
        sequence: IntArray | None = None
        for member in readers:
            places = _places(member, group.units)
            if places.shape[1] != 1:
                continue
            at = places[units, 0]
            order = units[np.argsort(at)]
            at = np.sort(at)
            length = tensors[member.parameter].shape[member.axis]
            aligned = at[0] % length % 4 == 0 and at[-1] - at[0] == at.size - 1
            if not aligned or at[0] // length != at[-1] // length:
                continue
            if sequence is not None and not np.array_equal(order, sequence):
                continue
            sequence = order
            rows.append(_rows(tensors[member.parameter], member, at, length))
        if sequence is None or sequence.size < 8:
            continue
        tried += 1
        result = search_permutation(np.concatenate(rows), seconds / group.blocks, seed=block)
        sources[sequence] = sequence[result.order]
        before += result.before
        after += result.after
    if not tried:
        raise _Impossible("no masked layer reads eight or more of these channels as whole groups of four")
    return sources, before, after


def _rows(weight: Tensor, member: Member, at: IntArray, length: int) -> np.ndarray:
    """The weights at positions `at` of the input axis: [rows, positions]."""
    values = weight.detach().float().cpu()
    if length != member.size:
        # Of a grouped convolution: the filters of the one group that reads these channels.
        filters = values.shape[0] * length // member.size
        part = int(at[0]) // length
        values = values[part * filters : (part + 1) * filters]
        at = at - part * length
    moved = values.movedim(member.axis, -1).flatten(0, -2)
    result: np.ndarray = moved[:, torch.from_numpy(at)].numpy()
    return result


@torch.no_grad()
def _apply(group: PruneGroup, sources: IntArray, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reorder all members of a group; returns what they held before.

    Raises:
        _Impossible: a member cannot follow; nothing is changed then.
    """
    planned: list[tuple[Member, IntArray]] = []
    for member in group.members:
        places = _places(member, group.units)
        taken = np.arange(member.size)
        taken[places] = places[sources]
        length = tensors[member.parameter].shape[member.axis]
        if length != member.size and (taken // length != np.arange(member.size) // length).any():
            raise _Impossible(f"channels would change groups in {member.module}")
        planned.append((member, taken))
    undo = {member.parameter: tensors[member.parameter].detach().clone() for member, _ in planned}
    for member, taken in planned:
        tensor = tensors[member.parameter]
        length = tensor.shape[member.axis]
        if length == member.size:
            tensor.copy_(tensor.index_select(member.axis, torch.from_numpy(taken).to(tensor.device)))
            continue
        parts = tensor.chunk(member.size // length, 0)
        for number, part in enumerate(parts):
            local = torch.from_numpy(taken[number * length : (number + 1) * length] - number * length)
            part.copy_(part.index_select(member.axis, local.to(part.device)))
    return undo


@torch.no_grad()
def _restore(tensors: dict[str, Tensor], undo: dict[str, Tensor]) -> None:
    for name, value in undo.items():
        tensors[name].copy_(value)


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _double(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """A copy in evaluation, in double precision if it can run so: then rounding of sums hides nothing."""
    wide = inputs.to(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    try:
        twin = copy.deepcopy(model).eval().double()
        _outputs(twin, wide)
    except RuntimeError:
        return copy.deepcopy(model).eval(), inputs
    return twin, wide


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    return list(_tensors(model(*inputs.args, **inputs.kwargs)))


def _tensors(output: Any) -> Iterator[Tensor]:
    leaves = tree_leaves(dict(vars(output)) if hasattr(output, "__dataclass_fields__") else output)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    worst = 0.0
    for one, other in zip(expected, actual, strict=True):
        if one.shape != other.shape:
            return float("inf")
        if one.numel():
            worst = max(worst, float((one - other).abs().max() / one.abs().max().clamp(min=1e-12)))
    return worst
