"""ResNet-20 for small images (He et al. 2015, section 4.2) in graph mode, as `openwork.demo.network` has it.

Weights are named like its modules, with ``/``: ``blocks/0/conv1/kernel``; layers are ``blocks/0/conv1/Conv2D``.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from openwork.demo.digits import SIDE

__all__ = ["EPSILON", "ResNet20Graph", "resnet20"]

# What TensorFlow's fused batch norm takes for 1e-5.
EPSILON = 1.001e-5
_MOMENTUM = 0.1


@dataclass(frozen=True, eq=False)
class ResNet20Graph:
    """A graph with its ends.

    Attributes:
        graph: the graph.
        image: float32 [n, 16, 16, 1].
        label: int64 [n].
        logits: float32 [n, 10], named ``logits``.
        loss: mean cross-entropy.
    """

    graph: tf.Graph
    image: tf.Tensor
    label: tf.Tensor
    logits: tf.Tensor
    loss: tf.Tensor


def _uniform(fan_in: int) -> object:
    return tf.compat.v1.random_uniform_initializer(-(fan_in**-0.5), fan_in**-0.5)


def _conv(x: tf.Tensor, name: str, outputs: int, size: int = 3, stride: int = 1) -> tf.Tensor:
    inputs = int(x.shape[-1])
    kernel = tf.compat.v1.get_variable(
        f"{name}/kernel", [size, size, inputs, outputs], initializer=_uniform(size * size * inputs)
    )
    pad = size // 2
    return tf.nn.conv2d(x, kernel, stride, [[0, 0], [pad, pad], [pad, pad], [0, 0]], name=f"{name}/Conv2D")


def _norm(x: tf.Tensor, name: str, training: bool) -> tf.Tensor:
    v1 = tf.compat.v1
    width = [int(x.shape[-1])]
    ones, zeros = v1.ones_initializer(), v1.zeros_initializer()
    gamma = v1.get_variable(f"{name}/gamma", width, initializer=ones)
    beta = v1.get_variable(f"{name}/beta", width, initializer=zeros)
    mean = v1.get_variable(f"{name}/moving_mean", width, initializer=zeros, trainable=False)
    variance = v1.get_variable(f"{name}/moving_variance", width, initializer=ones, trainable=False)
    if not training:
        return v1.nn.fused_batch_norm(x, gamma, beta, mean, variance, EPSILON, is_training=False, name=name)[0]
    result, batch_mean, batch_variance = v1.nn.fused_batch_norm(x, gamma, beta, epsilon=EPSILON, name=name)
    for moving, batch in ((mean, batch_mean), (variance, batch_variance)):
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, v1.assign_sub(moving, (moving - batch) * _MOMENTUM))
    return result


def _block(x: tf.Tensor, name: str, outputs: int, stride: int, training: bool) -> tf.Tensor:
    inner = tf.nn.relu(_norm(_conv(x, f"{name}/conv1", outputs, 3, stride), f"{name}/bn1", training))
    result = _norm(_conv(inner, f"{name}/conv2", outputs), f"{name}/bn2", training)
    if stride != 1 or int(x.shape[-1]) != outputs:
        x = _norm(_conv(x, f"{name}/shortcut/0", outputs, 1, stride), f"{name}/shortcut/1", training)
    return tf.nn.relu(result + x)


def resnet20(training: bool, seed: int = 0) -> ResNet20Graph:
    """Build it, for training (batch statistics, updates in ``UPDATE_OPS``) or for inference."""
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(seed)
        image = v1.placeholder(tf.float32, [None, SIDE, SIDE, 1], name="image")
        label = v1.placeholder(tf.int64, [None], name="label")
        x = tf.nn.relu(_norm(_conv(image, "conv", 16), "bn", training))
        for number, (outputs, stride) in enumerate(
            [(16, 1), (16, 1), (16, 1), (32, 2), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1)]
        ):
            x = _block(x, f"blocks/{number}", outputs, stride, training)
        x = tf.reduce_mean(x, [1, 2], name="pool")
        kernel = v1.get_variable("fc/kernel", [64, 10], initializer=_uniform(64))
        bias = v1.get_variable("fc/bias", [10], initializer=_uniform(64))
        logits = tf.nn.bias_add(tf.matmul(x, kernel, name="fc/MatMul"), bias, name="logits")
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits)
        loss = tf.reduce_mean(losses, name="loss")
    return ResNet20Graph(graph, image, label, logits, loss)
