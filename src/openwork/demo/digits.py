"""The handwritten digits of scikit-learn, 8 x 8, enlarged to 16 x 16, as arrays for any framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SIDE", "DigitArrays", "load_arrays"]

SIDE = 16
_LARGEST = 16.0  # the images count black pixels in 4 x 4 squares
_TEST_SHARE = 0.2


@dataclass(frozen=True, eq=False)
class DigitArrays:
    """Images float32 [n, 16, 16] with mean near 0, labels int64 [n] in 0..9."""

    train_images: npt.NDArray[np.float32]
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.float32]
    test_labels: npt.NDArray[np.int64]


def load_arrays(seed: int = 0) -> DigitArrays:
    """All 1797 digits; a fifth of each class is held out for testing, always the same one for a seed."""
    from sklearn.datasets import load_digits as bundled
    from sklearn.model_selection import train_test_split

    pixels, labels = bundled(return_X_y=True)
    train, test, train_labels, test_labels = train_test_split(
        pixels, labels, test_size=_TEST_SHARE, random_state=seed, stratify=labels
    )

    def images(flat: Any) -> npt.NDArray[np.float32]:
        large = _doubled(np.asarray(flat, np.float32).reshape(-1, 8, 8) / np.float32(_LARGEST))
        return ((large - 0.3) / 0.35).astype(np.float32)

    return DigitArrays(images(train), np.asarray(train_labels), images(test), np.asarray(test_labels))


def _doubled(images: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Twice as high and wide, bilinear, the centres of pixels kept; beyond the edge lies the edge."""
    for axis in (1, 2):
        first, last = np.take(images, [0], axis), np.take(images, [-1], axis)
        inner = np.delete(images, -1, axis), np.delete(images, 0, axis)
        before, after = np.concatenate([first, inner[0]], axis), np.concatenate([inner[1], last], axis)
        halves = np.stack([0.75 * images + 0.25 * before, 0.75 * images + 0.25 * after], axis + 1)
        shape = list(images.shape)
        shape[axis] *= 2
        images = halves.reshape(shape)
    return images
