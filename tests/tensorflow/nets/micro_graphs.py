"""Micro-graphs: each function is one structure, small enough to run in milliseconds.

What a graph states (`kept`, `frozen`) follows from the structure by reasoning, never from what the engine said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
IMAGE = (None, 8, 8, 3)


@dataclass(frozen=True)
class MicroGraph:
    """One structure and what must come out of pruning it by half.

    Attributes:
        build: makes the graph from its placeholders and returns the output tensor.
        inputs: shapes of the placeholders ``x0``, ``x1``, ...; None stays open.
        kept: constant -> shape afterwards; constants not named are not judged.
        frozen: constants of which an axis must be named as frozen.
        onnx: whether the cut graph is also run in onnxruntime.
        session: whether TensorFlow's CPU build can run it.
    """

    build: Callable[..., tf.Tensor]
    inputs: tuple[tuple[int | None, ...], ...]
    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    onnx: bool = True
    session: bool = True

    def graph_def(self):
        """The frozen graph; its output is ``out``."""
        _RANDOM[0] = np.random.default_rng(3)
        with tf.Graph().as_default() as graph:
            given = [v1.placeholder(tf.float32, shape, name=f"x{i}") for i, shape in enumerate(self.inputs)]
            tf.identity(self.build(*given), name="out")
        return graph.as_graph_def()

    def feeds(self, batch=2):
        random = np.random.default_rng(4)
        return {
            f"x{i}:0": random.normal(size=[batch if size is None else size for size in shape]).astype("f")
            for i, shape in enumerate(self.inputs)
        }


GRAPHS: dict[str, MicroGraph] = {}
_RANDOM = [np.random.default_rng(3)]


def micro(*inputs, kept=None, frozen=(), onnx=True, session=True):
    def enter(build):
        GRAPHS[build.__name__] = MicroGraph(build, inputs or (IMAGE,), kept or {}, frozen, onnx, session)
        return build

    return enter


def weight(name, *shape, low=None):
    """A constant that stands for a trained variable."""
    values = _RANDOM[0].normal(size=shape) / np.sqrt(max(1, np.prod(shape[:-1])))
    if low is not None:
        values = _RANDOM[0].uniform(low, low + 1, size=shape)
    return tf.constant(values, tf.float32, name=name)


def conv(x, name, cout, kernel=3, strides=1, padding="SAME", groups=1, **more):
    """Convolution with bias; the filter is ``<name>/w``."""
    channels = x.shape[1] if more.get("data_format") == "NCHW" else x.shape[-1]
    filters = weight(f"{name}/w", kernel, kernel, channels // groups, cout)
    y = tf.nn.conv2d(x, filters, strides, padding, name=name, **more)
    return tf.nn.bias_add(y, weight(f"{name}/b", cout), data_format=more.get("data_format"))


def norm(x, name, training=False):
    channels = x.shape[-1]
    scale, offset = weight(f"{name}/gamma", channels, low=0.5), weight(f"{name}/beta", channels)
    if training:
        return v1.nn.fused_batch_norm(x, scale, offset, is_training=True)[0]
    mean, variance = weight(f"{name}/mean", channels), weight(f"{name}/variance", channels, low=0.5)
    return v1.nn.fused_batch_norm(x, scale, offset, mean=mean, variance=variance, is_training=False)[0]


def dense(x, name, units, bias=True):
    y = tf.matmul(x, weight(f"{name}/w", x.shape[-1], units), name=name)
    return y + weight(f"{name}/b", units) if bias else y


def head(x):
    """Global mean and a linear layer."""
    return dense(tf.reduce_mean(x, [1, 2]), "head", 4)


@micro(kept={"a/w": (3, 3, 3, 4), "a/b": (4,), "n/mean": (4,), "b/w": (3, 3, 4, 3), "head/w": (3, 4)})
def chain(x):
    return head(tf.nn.relu(conv(norm(conv(x, "a", 8), "n"), "b", 6)))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 4), "head/w": (4, 4)})
def residual(x):
    x = tf.nn.relu(conv(x, "a", 8))
    return head(x + conv(x, "b", 8))


@micro(kept={"a/w": (3, 3, 3, 4), "n/gamma": (4,), "head/w": (4, 4)})
def norm_in_training(x):
    return head(norm(conv(x, "a", 8), "n", training=True))


@micro(kept={"a/w": (3, 3, 3, 4), "g": (4,), "m": (4,)})
def norm_by_hand(x):
    x = conv(x, "a", 8)
    inverse = tf.math.rsqrt(weight("v", 8, low=0.5) + 1e-3) * weight("g", 8, low=0.5)
    return head(x * inverse + (weight("o", 8) - weight("m", 8) * inverse))


@micro(kept={"a/w": (3, 3, 3, 4), "g": (4,)})
def norm_by_moments(x):
    x = conv(x, "a", 8)
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return head(tf.nn.batch_normalization(x, mean, variance, weight("o", 8), weight("g", 8), 1e-3))


@micro(kept={"a/w": (3, 3, 3, 4), "g": (4,)})
def layer_norm(x):
    x = conv(x, "a", 8)
    mean, variance = tf.nn.moments(x, [3], keepdims=True)
    x = tf.nn.batch_normalization(x, mean, variance, weight("o", 8), weight("g", 8), 1e-3)
    return head(conv(x, "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "d/w": (3, 3, 4, 1), "b/w": (1, 1, 4, 3)})
def depthwise(x):
    x = tf.nn.relu(conv(x, "a", 8))
    x = tf.nn.depthwise_conv2d(x, weight("d/w", 3, 3, 8, 1), [1, 1, 1, 1], "SAME")
    return head(conv(x, "b", 6, 1))


@micro(kept={"a/w": (3, 3, 3, 4), "d/w": (3, 3, 4, 2), "d/b": (8,), "b/w": (1, 1, 8, 3)})
def depthwise_with_multiplier(x):
    x = conv(x, "a", 8)
    x = tf.nn.depthwise_conv2d(x, weight("d/w", 3, 3, 8, 2), [1, 1, 1, 1], "SAME")
    return head(conv(tf.nn.bias_add(x, weight("d/b", 16)), "b", 6, 1))


@micro(kept={"a/w": (3, 3, 6, 4)}, frozen=("d/w",))
def depthwise_on_the_image(x):
    x = tf.nn.depthwise_conv2d(x, weight("d/w", 3, 3, 3, 2), [1, 1, 1, 1], "SAME")
    return head(conv(x, "a", 8))


@micro(kept={"a/w": (3, 3, 3, 4), "g/w": (3, 3, 2, 4), "b/w": (3, 3, 4, 3)})
def grouped(x):
    x = conv(conv(x, "a", 8), "g", 8, groups=2)
    return head(conv(x, "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def dilated(x):
    return head(conv(conv(x, "a", 8), "b", 6, dilations=2))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def explicit_padding(x):
    return head(conv(conv(x, "a", 8, padding=[[0, 0], [2, 1], [0, 2], [0, 0]]), "b", 6, strides=2))


@micro((None, 3, 8, 8), kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3), "n/g": (4,)}, session=False)
def channels_first(x):
    x = conv(x, "a", 8, data_format="NCHW")
    x, _, _ = v1.nn.fused_batch_norm(
        x, weight("n/g", 8, low=0.5), weight("n/b", 8), weight("n/m", 8), weight("n/v", 8, low=0.5),
        data_format="NCHW", is_training=False,
    )  # fmt: skip
    x = tf.nn.max_pool2d(x, 2, 2, "VALID", data_format="NCHW")
    x = conv(x, "b", 6, data_format="NCHW")
    return dense(tf.reduce_mean(x, [2, 3]), "head", 4)


@micro(kept={"a/w": (3, 3, 3, 4), "t/w": (3, 3, 3, 4), "b/w": (3, 3, 3, 2)})
def transposed(x):
    x = conv(x, "a", 8)
    x = tf.nn.conv2d_transpose(x, weight("t/w", 3, 3, 6, 8), [tf.shape(x)[0], 16, 16, 6], 2, "SAME")
    return head(conv(x, "b", 4))


@micro((2, 8, 8, 3), kept={"a/w": (3, 3, 3, 4), "t/w": (3, 3, 3, 4)})
def transposed_to_a_constant_size(x):
    x = tf.nn.conv2d_transpose(conv(x, "a", 8), weight("t/w", 3, 3, 6, 8), [2, 16, 16, 6], 2, "SAME")
    return head(x)


@micro((None, 12), kept={"a/w": (12, 4), "a/b": (4,), "b/w": (4, 3)})
def linear(x):
    return dense(dense(tf.nn.relu(dense(x, "a", 8)), "b", 6, bias=False), "head", 4)


@micro((None, 12), kept={"a": (4, 12), "b": (4, 4)})
def linear_transposed(x):
    x = tf.nn.relu(tf.matmul(x, weight("a", 8, 12), transpose_b=True))
    return tf.matmul(x, weight("b", 4, 8), transpose_b=True)


@micro(kept={"a/w": (3, 3, 3, 4), "head/w": (64 * 4, 4)})
def flatten_to_a_constant(x):
    return dense(tf.reshape(conv(x, "a", 8), [-1, 512]), "head", 4)


@micro(kept={"a/w": (3, 3, 3, 4), "head/w": (64 * 4, 4)})
def flatten_by_shape_arithmetic(x):
    x = conv(x, "a", 8)
    shape = tf.shape(x)
    flat = tf.reshape(x, tf.stack([shape[0], shape[1] * shape[2] * shape[3]]))
    return dense(tf.ensure_shape(flat, [None, 512]), "head", 4)


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def size_written_beside_the_batch(x):
    x = conv(x, "a", 8)
    x = tf.reshape(x, [tf.shape(x)[0], 64, 8])
    return head(conv(tf.reshape(x, [tf.shape(x)[0], 8, 8, 8]), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 3, 3), "c/w": (3, 3, 7, 2)})
def concat(x):
    return head(conv(tf.concat([conv(x, "a", 8), conv(x, "b", 6)], -1), "c", 4))


@micro(kept={"a/w": (3, 3, 3, 4), "c/w": (3, 3, 7, 2)})
def concat_with_the_image(x):
    return head(conv(tf.concat([conv(x, "a", 8), x], 3), "c", 4))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 2, 3), "c/w": (3, 3, 2, 3)})
def split(x):
    first, second = tf.split(conv(x, "a", 8), 2, axis=3)
    return head(conv(first, "b", 6) + conv(second, "c", 6))


@micro(kept={"a/w": (3, 3, 3, 4)})
def split_by_sizes(x):
    first, second = tf.split(conv(x, "a", 8), [3, 5], axis=3)
    return head(conv(first, "b", 6) + conv(second, "c", 6))


@micro(kept={"a/w": (3, 3, 3, 4)})
def strided_slice(x):
    x = conv(x, "a", 8)
    return head(conv(x[..., :4] * tf.sigmoid(x[:, :, :, 4:]), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4)})
def slice_of_channels(x):
    x = conv(x, "a", 8)
    return head(conv(tf.slice(x, [0, 0, 0, 2], [-1, 8, 8, 5]), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def crop(x):
    x = conv(x, "a", 8)[:, 1:-1, ::2]
    return head(conv(x, "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def padded(x):
    x = tf.pad(conv(x, "a", 8), [[0, 0], [1, 1], [1, 1], [0, 0]])
    x = tf.pad(x, [[0, 0], [2, 2], [2, 2], [0, 0]], "REFLECT")
    return head(conv(x, "b", 6, padding="VALID"))


@micro(kept={"a/w": (3, 3, 3, 4)})
def padded_shortcut(x):
    """A residual sum whose shortcut gets channels of zeros."""
    x = tf.nn.relu(conv(x, "a", 8))
    y = conv(x, "b", 12, strides=2)
    short = tf.pad(tf.nn.avg_pool2d(x, 2, 2, "SAME"), [[0, 0], [0, 0], [0, 0], [2, 2]])
    return head(tf.nn.relu(y + short))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def pools(x):
    x = tf.nn.max_pool2d(conv(x, "a", 8), 2, 2, "SAME")
    return head(conv(tf.nn.avg_pool2d(x, 3, 1, "SAME"), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "s/w": (4, 2), "e/w": (2, 4), "b/w": (3, 3, 4, 3)})
def squeeze_and_excite(x):
    x = conv(x, "a", 8)
    s = tf.nn.relu(dense(tf.reduce_mean(x, [1, 2]), "s", 4))
    s = tf.sigmoid(dense(s, "e", 8))
    return head(conv(x * tf.expand_dims(tf.expand_dims(s, 1), 1), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def softmax_over_channels(x):
    return head(conv(tf.nn.softmax(conv(x, "a", 8)), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4)})
def mean_over_channels(x):
    x = conv(x, "a", 8)
    return head(conv(x * tf.reduce_mean(x, -1, keepdims=True) + tf.reduce_max(x, 3, keepdims=True), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def resized(x):
    x = tf.compat.v1.image.resize_bilinear(conv(x, "a", 8), [16, 16])
    x = tf.compat.v1.image.resize_nearest_neighbor(x, tf.shape(x)[1:3] // 2)
    return head(conv(x, "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 16, 3)})
def space_to_depth(x):
    return head(conv(tf.nn.space_to_depth(conv(x, "a", 8), 2), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 8), "b/w": (3, 3, 2, 3)})
def depth_to_space(x):
    return head(conv(tf.nn.depth_to_space(conv(x, "a", 16), 2), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def transposes(x):
    x = tf.transpose(conv(x, "a", 8), [0, 3, 1, 2])
    x = tf.nn.relu(tf.squeeze(tf.expand_dims(x, 1), 1))
    return head(conv(tf.transpose(x, [0, 2, 3, 1]), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4)})
def stacked(x):
    a, b = conv(x, "a", 8), conv(x, "b", 8)
    both = tf.stack([a, b], axis=1)
    first, second = tf.unstack(both, axis=1)
    return head(conv(first * second, "c", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 8, 3)})
def tiled(x):
    return head(conv(tf.tile(conv(x, "a", 8), [1, 1, 1, 2]), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4)})
def channel_shuffle(x):
    x = conv(x, "a", 8)
    x = tf.reshape(x, [-1, 8, 8, 2, 4])
    x = tf.reshape(tf.transpose(x, [0, 1, 2, 4, 3]), [-1, 8, 8, 8])
    return head(conv(x, "b", 6))


@micro((None, 6, 8), kept={"q": (8, 4), "k": (8, 4), "v": (8, 4), "o": (4, 8)})
def attention_with_heads(x):
    """Whole heads go: q, k, v and what reads them."""

    def heads(name):
        y = tf.matmul(tf.reshape(x, [-1, 8]), weight(name, 8, 8))
        return tf.transpose(tf.reshape(y, [-1, 6, 2, 4]), [0, 2, 1, 3])

    q, k, v = heads("q"), heads("k"), heads("v")
    scores = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * 0.5)
    y = tf.reshape(tf.transpose(tf.matmul(scores, v), [0, 2, 1, 3]), [-1, 8])
    return tf.reshape(tf.matmul(y, weight("o", 8, 8)), [-1, 6, 8])


@micro((None, 6, 8), kept={"q": (8, 1, 2), "k": (8, 1, 2), "v": (8, 1, 2), "o": (1, 2, 8)})
def attention_by_einsum(x):
    """Heads and features are axes of their own, so both may go."""
    q, k, v = (tf.einsum("abc,chd->abhd", x, weight(name, 8, 2, 4)) for name in "qkv")
    scores = tf.nn.softmax(tf.einsum("aehd,abhd->ahbe", k, q))
    return tf.einsum("abhd,hdc->abc", tf.einsum("ahbe,aehd->abhd", scores, v), weight("o", 2, 4, 8))


@micro((None, 12), kept={"a/w": (12, 4), "b/w": (4, 3)})
def dropout(x):
    x = tf.nn.relu(dense(x, "a", 8))
    noise = tf.random.uniform(tf.shape(x), seed=1)
    kept = tf.where(noise >= -1.0, x, tf.zeros_like(x))  # drops nothing, so that results can be compared
    return dense(dense(kept, "b", 6), "head", 4)


@micro((None, 8), kept={"a/w": (8, 4)})
def clipped_and_selected(x):
    x = dense(x, "a", 8)
    x = tf.clip_by_value(tf.where(x > 0, tf.exp(-x), tf.math.softplus(x)), 0.1, 3.0)
    return dense(tf.maximum(x, weight("m", 8)) ** 2, "head", 4)


@micro(kept={"a/w": (3, 3, 3, 4), "alpha": (1, 1, 4)})
def prelu(x):
    x = conv(x, "a", 8)
    return head(conv(tf.nn.relu(x) - weight("alpha", 1, 1, 8) * tf.nn.relu(-x), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "low": (4,)}, onnx=False)
def fake_quantised(x):
    x = conv(x, "a", 8)
    x = tf.quantization.fake_quant_with_min_max_vars_per_channel(x, -weight("low", 8, low=1), weight("high", 8, low=1))
    return head(conv(tf.quantization.fake_quant_with_min_max_args(x), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)}, onnx=False)
def conditional(x):
    """Switch and Merge of an is_training switch."""
    switch = v1.placeholder_with_default(False, [], name="is_training")
    x = conv(x, "a", 8)
    on_true, on_false = v1.raw_ops.Switch(data=x, pred=switch)[::-1]
    x, _ = v1.raw_ops.Merge(inputs=[on_false * 2.0, norm(on_true, "n")])
    return head(conv(x, "b", 6))


@micro((None, 10, 4), kept={"a": (3, 4, 4), "b": (3, 4, 3)})
def conv1d(x):
    x = tf.nn.relu(tf.nn.conv1d(x, weight("a", 3, 4, 8), 1, "SAME"))
    x = tf.nn.conv1d(x, weight("b", 3, 8, 6), 1, "SAME")
    return dense(tf.reduce_mean(x, 1), "head", 4)


@micro((None, 4, 6, 6, 2), kept={"a": (3, 3, 3, 2, 4), "b": (1, 1, 1, 4, 3)})
def conv3d(x):
    x = tf.nn.conv3d(x, weight("a", 3, 3, 3, 2, 8), [1, 1, 1, 1, 1], "SAME")
    x = tf.nn.conv3d(tf.nn.max_pool3d(x, 2, 2, "SAME"), weight("b", 1, 1, 1, 8, 6), [1, 1, 1, 1, 1], "SAME")
    return dense(tf.reduce_mean(x, [1, 2, 3]), "head", 4)


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 4)})
def shared_filter(x):
    """One filter used twice: what goes from its outputs goes from its inputs."""
    x = conv(x, "a", 8)
    filters = weight("b/w", 3, 3, 8, 8)
    return head(tf.nn.conv2d(tf.nn.relu(tf.nn.conv2d(x, filters, 1, "SAME")), filters, 1, "SAME"))


@micro(kept={"b/w": (3, 3, 8, 3)}, frozen=("a/w",))
def channels_in_order(x):
    """Picking channels by rank: their order matters."""
    x = conv(x, "a", 8)
    return head(conv(tf.nn.top_k(x, 8).values, "b", 6))


@micro(kept={"b/w": (3, 3, 8, 3)}, frozen=("a/w",))
def local_response(x):
    return head(conv(tf.nn.lrn(conv(x, "a", 8)), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4)})
def two_inputs_of_one_shape(x):
    y = conv(x, "a", 8)
    return head(tf.add_n([y, conv(x, "b", 8), tf.fill(tf.shape(y), 0.5)]))


@micro((None, 3, 8, 8), kept={"a/w": (3, 3, 3, 4), "d/w": (3, 3, 4, 1), "t/w": (3, 3, 3, 4)}, session=False)
def channels_first_depthwise_and_transposed(x):
    x = conv(x, "a", 8, data_format="NCHW")
    x = tf.nn.depthwise_conv2d(x, weight("d/w", 3, 3, 8, 1), [1, 1, 1, 1], "SAME", data_format="NCHW")
    filters = weight("t/w", 3, 3, 6, 8)
    x = tf.nn.conv2d_transpose(x, filters, [tf.shape(x)[0], 6, 16, 16], 2, "SAME", data_format="NCHW")
    return dense(tf.reduce_mean(x, [2, 3]), "head", 4)


@micro((None, 3, 8, 8), kept={"a/w": (3, 3, 3, 8), "b/w": (3, 3, 2, 3)}, session=False)
def channels_first_depth_to_space(x):
    x = tf.nn.depth_to_space(conv(x, "a", 16, data_format="NCHW"), 2, data_format="NCHW")
    return dense(tf.reduce_mean(conv(x, "b", 6, data_format="NCHW"), [2, 3]), "head", 4)


@micro(kept={"a/w": (3, 3, 3, 4), "n/s": (4,), "m/s": (4,)})
def older_batch_norms(x):
    x = conv(x, "a", 8)
    vectors = {key: weight(f"n/{key}", 8, low=0.5) for key in ("s", "o", "m", "v")}
    raw = tf.raw_ops
    x = raw.FusedBatchNorm(
        x=x, scale=vectors["s"], offset=vectors["o"], mean=vectors["m"], variance=vectors["v"], is_training=False
    ).y
    other = {key: weight(f"m/{key}", 8, low=0.5) for key in ("s", "o", "m", "v")}
    x = raw.FusedBatchNormV2(
        x=x, scale=other["s"], offset=other["o"], mean=other["m"], variance=other["v"], is_training=False
    ).y
    return head(conv(x, "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def dilated_through_the_batch(x):
    """How dilation was written before convolutions had it."""
    x = tf.space_to_batch(conv(x, "a", 8), [2, 2], [[0, 0], [0, 0]])
    return head(tf.batch_to_space(conv(x, "b", 6), [2, 2], [[0, 0], [0, 0]]))


@micro(kept={"a/w": (3, 3, 3, 4)})
def slices_with_new_axes_and_negative_bounds(x):
    x = conv(x, "a", 8)[:, tf.newaxis, ..., -6:]
    return head(conv(x[:, 0], "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def copies(x):
    x = tf.stop_gradient(tf.identity(conv(x, "a", 8)))
    x, _ = tf.identity_n([x, tf.reduce_sum(x)])
    x = tf.ensure_shape(tf.debugging.check_numerics(x, "no"), [None, 8, 8, 8])
    return head(conv(tf.cast(tf.cast(x, tf.float64), tf.float32), "b", 6))


@micro((None, 5), (20, 8), kept={"w": (8, 4), "o": (4, 4)})
def table_that_is_fed(x, table):
    """Rows of a fed table: nothing of it may go, what comes after may."""
    rows = tf.gather(table, tf.cast(tf.abs(x), tf.int32) % 20)
    y = tf.nn.relu(tf.matmul(tf.reduce_sum(rows, 1), weight("w", 8, 8)))
    return tf.matmul(y, weight("o", 8, 4))


@micro((None, 5), kept={"table": (20, 4), "w": (4, 4)})
def embedding_table(x):
    rows = tf.gather(weight("table", 20, 8), tf.cast(tf.abs(x), tf.int32) % 20)
    return tf.matmul(tf.reduce_sum(rows, 1), weight("w", 8, 4))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def broadcast_to_a_size(x):
    x = conv(x, "a", 8)
    mean = tf.broadcast_to(tf.reduce_mean(x, [1, 2], keepdims=True), [tf.shape(x)[0], 8, 8, 8])
    return head(conv(x * mean + tf.ones_like(x), "b", 6))


@micro(kept={"a/w": (3, 3, 3, 8)}, frozen=("a/w",))
def channels_picked_by_an_index(x):
    x = tf.gather(conv(x, "a", 8), [7, 1, 3, 0], axis=3)
    return head(conv(x, "b", 6))


@micro(kept={"a/w": (3, 3, 3, 4), "b/w": (3, 3, 4, 3)})
def cumulated_over_places(x):
    return head(conv(tf.cumsum(tf.reverse(conv(x, "a", 8), [1]), axis=1), "b", 6))
