"""Training and testing the demo's graph."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from openwork.demo.console import progress
from openwork.demo.digits import DigitArrays
from openwork.demo_tensorflow.network import ResNet20Graph

__all__ = ["TrainingStep", "accuracy", "train", "training_step"]

_BATCH = 64
_DECAY = 5e-4


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """An optimizer in a graph.

    Attributes:
        operator: one step, the updates of moving statistics included.
        rate: its learning rate, a placeholder.
    """

    operator: tf.Operation
    rate: tf.Tensor


def training_step(net: ResNet20Graph) -> TrainingStep:
    """SGD with Nesterov's momentum and weight decay."""
    v1 = tf.compat.v1
    with net.graph.as_default():
        rate = v1.placeholder(tf.float32, [], name="rate")
        decay = _DECAY * tf.add_n([tf.nn.l2_loss(variable) for variable in v1.trainable_variables()])
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            operator = v1.train.MomentumOptimizer(rate, 0.9, use_nesterov=True).minimize(net.loss + decay)
    return TrainingStep(operator, rate)


def train(
    session: tf.compat.v1.Session,
    net: ResNet20Graph,
    step: TrainingStep,
    digits: DigitArrays,
    epochs: int,
    rate: float,
    what: str,
    seed: int = 0,
) -> None:
    """One cycle of the learning rate (Smith & Topin 2017), batches of 64.

    Args:
        session: holds the variables.
        net, step: the graph and its optimizer.
        digits: the data.
        epochs: passes over the training images.
        rate: highest learning rate.
        what: what the progress bar says.
        seed: of the order of the images.
    """
    count = len(digits.train_images)
    batches = -(-count // _BATCH)
    order = np.random.default_rng(seed)
    with progress(what, epochs * batches) as advance:
        for done in range(epochs * batches):
            if done % batches == 0:
                shuffled = order.permutation(count)
            chosen = shuffled[(done % batches) * _BATCH :][:_BATCH]
            feed = {
                net.image: digits.train_images[chosen][..., None],
                net.label: digits.train_labels[chosen],
                step.rate: rate * _share((done + 1) / (epochs * batches)),
            }
            session.run(step.operator, feed)
            advance(done + 1)


def _share(time: float) -> float:
    """Share of the highest rate at a time from 0 to 1: up in the first third, then down, as cosines."""
    rising = min(1.0, time / 0.3)
    falling = max(0.0, (time - 0.3) / 0.7)
    return 0.04 + 0.96 * (1 - math.cos(math.pi * rising)) / 2 if falling == 0 else (1 + math.cos(math.pi * falling)) / 2


def accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    """Share of the images that are classified as labelled."""
    return float((logits.argmax(1) == labels).mean())
