"""Several processes, one search: each scores its share, the sums are the same everywhere."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["is_writer", "rank_and_size", "sum_over_ranks"]


def rank_and_size() -> tuple[int, int]:
    """(rank, number of processes) of the default process group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def is_writer() -> bool:
    """Whether this process writes files."""
    return rank_and_size()[0] == 0


def sum_over_ranks(arrays: list[np.ndarray], device: torch.device) -> list[np.ndarray]:
    """The arrays summed over all processes, bit for bit the same in each of them.

    Args:
        arrays: float64, of the same shapes in every process.
        device: where the process group can reduce (the CPU for gloo).
    """
    if rank_and_size()[1] == 1 or not arrays:
        return arrays
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device)
    dist.all_reduce(flat)
    total = flat.cpu().numpy()
    ends = np.cumsum([array.size for array in arrays])[:-1]
    return [part.reshape(array.shape) for part, array in zip(np.split(total, ends), arrays, strict=True)]
