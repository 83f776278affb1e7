"""Masked equivalence by hand: what survived is recovered from the weights' values alone.

`distinct_` makes all numbers of a weight different, so each number of a pruned weight is found again in the
original one. The masked original keeps those and has zeros elsewhere. This knows neither the plan nor the engine.
It does not cover operators that compute statistics across channels.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

__all__ = ["distinct_", "masked_by_hand", "surviving"]


def distinct_(model: nn.Module) -> None:
    """Give every weight of more than one dimension numbers that are all different, in its own range."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim > 1 and tensor.is_floating_point() and tensor.numel() > 1:
                numbers = torch.linspace(float(tensor.min()), float(tensor.max()), tensor.numel())
                assert len(numbers.unique()) == len(numbers)
                tensor.copy_(numbers[torch.randperm(len(numbers), generator=generator)].view(tensor.shape))


def surviving(original: Tensor, pruned: Tensor) -> Tensor:
    """Boolean mask over `original`: entries whose value is still there in `pruned`.

    Values that occur more than once in `original` (padding zeros, say) tell nothing and count as surviving.

    Raises:
        AssertionError: `pruned` holds a number that `original` does not have.
    """
    flat = original.detach().flatten()
    assert bool(torch.isin(pruned.detach().flatten(), flat).all()), "a pruned weight holds numbers of its own"
    values, counts = torch.unique(flat, return_counts=True)
    repeated = torch.isin(flat, values[counts > 1])
    return (torch.isin(flat, pruned.detach().flatten()) | repeated).view(original.shape)


def masked_by_hand(original: nn.Module, pruned: nn.Module) -> nn.Module:
    """A copy of `original` in which every weight entry that `pruned` lacks is zero.

    Vectors (biases, norms) are left alone: a channel that no weight reads may have any value.
    """
    masked = copy.deepcopy(original)
    after = {**dict(pruned.named_parameters()), **dict(pruned.named_buffers())}
    with torch.no_grad():
        for name, tensor in (*masked.named_parameters(), *masked.named_buffers()):
            if tensor.ndim > 1 and tensor.is_floating_point() and after[name].shape != tensor.shape:
                tensor.mul_(surviving(tensor, after[name]))
    return masked
