"""Random graphs: blocks of the structures that networks are made of, drawn one after another."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from micro_graphs import conv, dense, head, norm, weight

v1 = tf.compat.v1


class Drawing:
    """Draws a graph from a seed."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.count = 0

    def name(self):
        self.count += 1
        return f"layer{self.count}"

    def width(self):
        return int(self.random.choice([4, 6, 8, 12]))

    def graph_def(self, blocks):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [None, 8, 8, 3], name="x0")
            x = conv(x, self.name(), self.width())
            kinds = [getattr(self, name) for name in sorted(vars(Drawing)) if name.startswith("draw_")]
            for _ in range(blocks):
                x = kinds[self.random.integers(len(kinds))](x)
            tf.identity(head(x), name="out")
        return graph.as_graph_def()

    def draw_conv(self, x):
        return tf.nn.relu(norm(conv(x, self.name(), self.width()), self.name()))

    def draw_residual(self, x):
        y = conv(tf.nn.relu(x), self.name(), self.width())
        return x + conv(tf.nn.elu(y), self.name(), x.shape[-1])

    def draw_bottleneck_with_shortcut(self, x):
        width = self.width()
        return tf.nn.relu(conv(conv(x, self.name(), 6), self.name(), width) + conv(x, self.name(), width, 1))

    def draw_depthwise(self, x):
        times = int(self.random.integers(1, 3))
        x = tf.nn.depthwise_conv2d(x, weight(f"{self.name()}/w", 3, 3, x.shape[-1], times), [1, 1, 1, 1], "SAME")
        return tf.nn.relu6(x)

    def draw_grouped(self, x):
        groups = 2
        return conv(conv(x, self.name(), 8), self.name(), 8, groups=groups)

    def draw_gate(self, x):
        s = tf.reduce_mean(x, [1, 2])
        s = tf.sigmoid(dense(tf.nn.relu(dense(s, self.name(), 4)), self.name(), x.shape[-1]))
        return x * s[:, tf.newaxis, tf.newaxis]

    def draw_concat(self, x):
        return tf.concat([conv(x, self.name(), self.width()), x, conv(x, self.name(), self.width(), 1)], -1)

    def draw_split(self, x):
        width = x.shape[-1]
        if width % 2:
            return x
        first, second = tf.split(x, 2, -1) if self.random.integers(2) else (x[..., : width // 2], x[..., width // 2 :])
        return tf.concat([second, conv(first, self.name(), self.width())], 3)

    def draw_uneven_split(self, x):
        width = x.shape[-1]
        first, second = tf.split(x, [width // 3, width - width // 3], -1)
        return tf.concat([tf.nn.relu(second), conv(first, self.name(), 6)], 3)

    def draw_shuffle(self, x):
        width = x.shape[-1]
        if width % 2:
            return x
        shape = tf.shape(x)
        y = tf.reshape(x, tf.stack([shape[0], 8, 8, 2, width // 2]))
        return tf.reshape(tf.transpose(y, [0, 1, 2, 4, 3]), [-1, 8, 8, width])

    def draw_norm_over_channels(self, x):
        mean, variance = tf.nn.moments(x, [3], keepdims=True)
        gain = weight(f"{self.name()}/gain", x.shape[-1], low=0.5)
        return (x - mean) * tf.math.rsqrt(variance + 1e-3) * gain

    def draw_group_norm(self, x):
        width = x.shape[-1]
        if width % 2:
            return x
        y = tf.reshape(x, [-1, 8, 8, 2, width // 2])
        mean, variance = tf.nn.moments(y, [1, 2, 4], keepdims=True)
        y = tf.reshape((y - mean) * tf.math.rsqrt(variance + 1e-3), [-1, 8, 8, width])
        return y * weight(f"{self.name()}/gain", width, low=0.5)

    def draw_space(self, x):
        return tf.nn.depth_to_space(conv(tf.nn.space_to_depth(x, 2), self.name(), 16), 2)

    def draw_transposed_conv(self, x):
        x = tf.nn.max_pool2d(x, 2, 2, "SAME")
        width = self.width()
        filters = weight(f"{self.name()}/w", 3, 3, width, x.shape[-1])
        return tf.nn.conv2d_transpose(x, filters, tf.stack([tf.shape(x)[0], 8, 8, width]), 2, "SAME")

    def draw_pad_channels(self, x):
        return tf.pad(tf.nn.avg_pool2d(x, 3, 1, "SAME"), [[0, 0], [0, 0], [0, 0], [1, 2]])

    def draw_attention(self, x):
        """Over places, with two heads; the width inside is written in reshapes."""
        inner = 8

        def heads(name):
            y = conv(x, name, inner, 1)
            return tf.transpose(tf.reshape(y, [-1, 64, 2, inner // 2]), [0, 2, 1, 3])

        q, k, v = heads(self.name()), heads(self.name()), heads(self.name())
        y = tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * 0.5), v)
        y = tf.reshape(tf.transpose(y, [0, 2, 1, 3]), [-1, 8, 8, inner])
        return x + conv(y, self.name(), x.shape[-1], 1)

    def draw_scale(self, x):
        return tf.nn.softplus(x * weight(f"{self.name()}/s", 1, 1, 1, x.shape[-1]))

    def draw_mixed(self, x):
        return x * tf.nn.softmax(x) + tf.reduce_max(x, -1, keepdims=True)

    def draw_transposed_layout(self, x):
        y = tf.transpose(x, [0, 3, 1, 2])
        y = tf.reshape(y, [-1, x.shape[-1], 64]) + weight(f"{self.name()}/p", x.shape[-1], 1)
        return tf.transpose(tf.reshape(y, [-1, x.shape[-1], 8, 8]), [0, 2, 3, 1])
