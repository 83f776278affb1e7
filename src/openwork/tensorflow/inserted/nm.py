"""N:M masks in a graph: in each group of M weights along the input channels the N largest magnitudes stay.

The mask is kept as one code for each group, a bit for each weight (2:4: a byte for four weights), so that the
checkpoint grows by a sixteenth rather than twofold. Ties keep the lower position, as `openwork.sparsity` does.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from openwork.config import NofMSetting
from openwork.tensorflow.inserted.steps import Steps

__all__ = ["nm_mask"]


def nm_mask(steps: Steps, weight: tf.Tensor, axis: int, setting: NofMSetting, order: tf.Tensor | None) -> tf.Tensor:
    """The mask of a weight, zeros and ones of its shape and type. Call it inside a helper scope.

    Args:
        steps: the training steps; the mask is chosen in the first one, and every ``update_freq`` steps.
        weight: the weight, dead channels already zero.
        axis: the axis of input channels.
        setting: N, M, update_freq.
        order: int32 [channels], the channels that stay first; groups run over these. None: all stay.
    """
    weight = tf.stop_gradient(weight)
    length = int(weight.shape[axis])
    groups = -(-length // setting.m)
    shape = weight.shape.as_list()
    kind = tf.uint8 if setting.m <= 8 else tf.int32
    codes = steps.decided(
        "codes",
        np.full([*shape[:axis], groups, *shape[axis + 1 :]], 2**setting.m - 1, kind.as_numpy_dtype),
        steps.due(setting.update_freq),
        lambda: _codes(weight if order is None else tf.gather(weight, order, axis=axis), axis, setting, kind),
    )
    bits = np.reshape(2 ** np.arange(setting.m), [setting.m] + [1] * (len(shape) - axis - 1)).astype(
        kind.as_numpy_dtype
    )
    chosen = tf.not_equal(tf.bitwise.bitwise_and(tf.expand_dims(codes, axis + 1), bits), 0)
    mask = tf.reshape(tf.cast(chosen, weight.dtype), [*shape[:axis], groups * setting.m, *shape[axis + 1 :]])
    if groups * setting.m != length:
        mask = tf.slice(mask, [0] * len(shape), shape)
    if order is not None:
        mask = tf.gather(mask, tf.argsort(order), axis=axis)
    return tf.stop_gradient(mask)


def _codes(weight: tf.Tensor, axis: int, setting: NofMSetting, kind: tf.DType) -> tf.Tensor:
    """Which weights of each group stay, one bit each: a weight stays if fewer than N others beat it."""
    shape = weight.shape.as_list()
    groups = -(-shape[axis] // setting.m)
    magnitude = tf.abs(weight)
    spare = groups * setting.m - shape[axis]
    if spare:
        magnitude = tf.pad(magnitude, [[0, spare if place == axis else 0] for place in range(len(shape))])
    magnitude = tf.reshape(magnitude, [*shape[:axis], groups, setting.m, *shape[axis + 1 :]])
    parts = tf.unstack(magnitude, axis=axis + 1)
    beaten = [tf.zeros(parts[0].shape, tf.uint8) for _ in parts]
    for first in range(setting.m):
        for second in range(first + 1, setting.m):
            wins = tf.cast(parts[first] >= parts[second], tf.uint8)
            beaten[second] += wins
            beaten[first] += tf.constant(1, tf.uint8) - wins
    bits = [
        tf.cast(count < tf.constant(setting.n, tf.uint8), kind) * tf.constant(2**place, kind)
        for place, count in enumerate(beaten)
    ]
    return tf.add_n(bits) if kind == tf.int32 else _sum(bits)


def _sum(parts: list[tf.Tensor]) -> tf.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
