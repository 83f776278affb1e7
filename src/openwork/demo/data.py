"""The digits as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from openwork.demo.digits import SIDE, load_arrays

__all__ = ["SIDE", "Digits", "load_digits"]


@dataclass(frozen=True, eq=False)
class Digits:
    """Images float32 [n, 1, 16, 16] with mean near 0, labels int64 [n] in 0..9."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_digits(seed: int = 0) -> Digits:
    """See `openwork.demo.digits.load_arrays`."""
    arrays = load_arrays(seed)
    return Digits(
        torch.from_numpy(arrays.train_images)[:, None],
        torch.from_numpy(arrays.train_labels),
        torch.from_numpy(arrays.test_images)[:, None],
        torch.from_numpy(arrays.test_labels),
    )
