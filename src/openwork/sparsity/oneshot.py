"""Choose N:M masks without training, from the weights and from what the layer's inputs look like.

All work on a matrix ``weight [rows, columns]`` whose columns stand so that each M neighbours are a group:

* magnitude: keep the largest |w|;
* Wanda (Sun et al. 2023, "A simple and effective pruning approach for large language models"): keep the
  largest |w| times the norm of the input feature that it multiplies;
* SparseGPT (Frantar and Alistarh 2023, "SparseGPT: massive language models can be accurately pruned in
  one-shot"): keep the largest w^2 / [H^-1]_jj^2, column by column, and let the columns to come make up for the
  error of those that went; H is the second moment of the input features.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from openwork.sparsity.masks import BoolArray, nm_mask

__all__ = ["METHODS", "magnitude", "sparse_gpt", "wanda"]

FloatArray = npt.NDArray[np.float64]

METHODS = ("magnitude", "wanda", "sparsegpt")


def magnitude(weight: FloatArray, n: int = 2, m: int = 4) -> BoolArray:
    """Mask by |weight|. See `nm_mask` for ties and tails.

    Args:
        weight: [rows, columns].
        n: weights kept of each group.
        m: size of a group.
    """
    mask: BoolArray = nm_mask(np.asarray(weight), n, m, axis=1)
    return mask


def wanda(weight: FloatArray, feature_norms: FloatArray, n: int = 2, m: int = 4) -> BoolArray:
    """Mask by |weight| times the norm of the input feature of each column.

    Args:
        weight: [rows, columns].
        feature_norms: [columns], L2 norms of the features over the calibration data.
        n: weights kept of each group.
        m: size of a group.

    Raises:
        ValueError: the sizes do not fit.
    """
    norms = np.asarray(feature_norms, dtype=np.float64)
    if norms.shape != weight.shape[1:]:
        raise ValueError(f"{norms.shape} norms do not fit a weight of shape {weight.shape}")
    mask: BoolArray = nm_mask(np.abs(weight) * norms, n, m, axis=1)
    return mask


def sparse_gpt(
    weight: FloatArray,
    second_moment: FloatArray,
    n: int = 2,
    m: int = 4,
    damping: float = 0.01,
    block: int = 128,
) -> tuple[FloatArray, BoolArray]:
    """Mask, and weights that make up for what the mask takes.

    Args:
        weight: [rows, columns]; it is not changed.
        second_moment: [columns, columns], X^T X of the calibration features X [samples, columns]; any positive
            scale.
        n: weights kept of each group.
        m: size of a group.
        damping: added to the diagonal, as a share of its mean.
        block: columns between two updates of all the columns that follow; rounded down to a multiple of m.

    Returns:
        The new weight, zero where the mask is False, and the mask.

    Raises:
        ValueError: the sizes do not fit.
    """
    values = np.array(weight, dtype=np.float64)
    moment = np.array(second_moment, dtype=np.float64)
    columns = values.shape[1]
    if moment.shape != (columns, columns):
        raise ValueError(f"a second moment of shape {moment.shape} does not fit a weight of {values.shape}")
    # A feature that never was anything but zero: its weights have no effect that could be measured.
    dead = np.diag(moment) == 0
    moment[dead, dead] = 1.0
    values[:, dead] = 0.0
    moment[np.diag_indices(columns)] += damping * np.mean(np.diag(moment))
    inverse = np.linalg.inv(moment)
    # Upper factor: row i holds, scaled, how column i's error spreads over the columns after it.
    spread = np.linalg.cholesky((inverse + inverse.T) / 2).T
    mask = np.zeros(values.shape, dtype=np.bool_)
    block = max(m, block // m * m)
    for start in range(0, columns, block):
        end = min(start + block, columns)
        errors = np.zeros((values.shape[0], end - start))
        for column in range(start, end):
            if (column - start) % m == 0:
                group = slice(column, min(column + m, end))
                scores = values[:, group] / np.diag(spread)[group]
                mask[:, group] = nm_mask(scores, n, m, axis=1)
            lost = np.where(mask[:, column], 0.0, values[:, column]) / spread[column, column]
            values[:, column:end] -= np.outer(lost, spread[column, column:end])
            errors[:, column - start] = lost
        values[:, end:] -= errors @ spread[start:end, end:]
    values[~mask] = 0.0
    return values, mask
