"""The handwritten digits of scikit-learn, 8 x 8, enlarged to 16 x 16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

__all__ = ["SIDE", "Digits", "load_digits"]

SIDE = 16
_LARGEST = 16.0  # the images count black pixels in 4 x 4 squares
_TEST_SHARE = 0.2


@dataclass(frozen=True, eq=False)
class Digits:
    """Images float32 [n, 1, 16, 16] with mean near 0, labels int64 [n] in 0..9."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_digits(seed: int = 0) -> Digits:
    """All 1797 digits; a fifth of each class is held out for testing, always the same one for a seed."""
    from sklearn.datasets import load_digits as bundled
    from sklearn.model_selection import train_test_split

    pixels, labels = bundled(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        pixels, labels, test_size=_TEST_SHARE, random_state=seed, stratify=labels
    )

    def images(flat: object) -> torch.Tensor:
        small = torch.as_tensor(flat, dtype=torch.float32).reshape(-1, 1, 8, 8) / _LARGEST
        large = functional.interpolate(small, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        return (large - 0.3) / 0.35

    return Digits(images(train), torch.as_tensor(train_labels), images(test), torch.as_tensor(test_labels))
