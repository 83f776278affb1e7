"""Small networks in graph mode, for training and for inference."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

tf1 = tf.compat.v1


@dataclass
class Net:
    """A graph with its ends."""

    graph: tf.Graph
    image: tf.Tensor
    label: tf.Tensor
    logits: tf.Tensor
    loss: tf.Tensor


def conv(x: tf.Tensor, name: str, outputs: int, size: int = 3, stride: int = 1, resource: bool = True) -> tf.Tensor:
    inputs = int(x.shape[-1])
    initial = tf1.random_normal_initializer(0.0, (2.0 / (size * size * inputs)) ** 0.5)
    kernel = tf1.get_variable(
        f"{name}/kernel", [size, size, inputs, outputs], tf.float32, initial, use_resource=resource
    )
    return tf.nn.conv2d(x, kernel, stride, "SAME", name=f"{name}/Conv2D")


def norm(x: tf.Tensor, name: str, training: bool, resource: bool = True) -> tf.Tensor:
    width = [int(x.shape[-1])]
    spread = tf1.random_uniform_initializer(0.5, 1.5)
    gamma = tf1.get_variable(f"{name}/gamma", width, tf.float32, spread, use_resource=resource)
    beta = tf1.get_variable(
        f"{name}/beta", width, tf.float32, tf1.random_normal_initializer(0, 0.1), use_resource=resource
    )
    mean = tf1.get_variable(
        f"{name}/moving_mean", width, tf.float32, tf1.random_normal_initializer(0, 0.1), trainable=False,
        use_resource=resource,
    )  # fmt: skip
    variance = tf1.get_variable(
        f"{name}/moving_variance", width, tf.float32, spread, trainable=False, use_resource=resource
    )
    if not training:
        return tf1.nn.fused_batch_norm(x, gamma, beta, mean, variance, is_training=False, name=name)[0]
    result, batch_mean, batch_variance = tf1.nn.fused_batch_norm(x, gamma, beta, name=name)
    for moving, batch in ((mean, batch_mean), (variance, batch_variance)):
        tf1.add_to_collection(
            tf1.GraphKeys.UPDATE_OPS, tf1.assign_sub(moving, (moving - batch) * 0.1, use_locking=True)
        )
    return result


def residual(training: bool, resource: bool = True, seed: int = 0, side: int = 8, batch: int | None = None) -> Net:
    """Stem, a residual block with a norm after each convolution, global mean, dense head with bias."""
    graph = tf.Graph()
    with graph.as_default():
        tf1.set_random_seed(seed)
        image = tf1.placeholder(tf.float32, [batch, side, side, 3], name="image")
        label = tf1.placeholder(tf.int64, [batch], name="label")
        x = tf.nn.relu(norm(conv(image, "stem", 16, resource=resource), "stem_bn", training, resource))
        y = tf.nn.relu(norm(conv(x, "first", 24, resource=resource), "first_bn", training, resource))
        y = norm(conv(y, "second", 16, resource=resource), "second_bn", training, resource)
        x = tf.nn.relu(x + y)
        x = tf.reduce_mean(x, [1, 2], name="pool")
        head = tf1.get_variable("head/kernel", [16, 5], use_resource=resource)
        bias = tf1.get_variable("head/bias", [5], initializer=tf1.zeros_initializer(), use_resource=resource)
        logits = tf.nn.bias_add(tf.matmul(x, head, name="head/MatMul"), bias, name="logits")
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits), name="loss")
    return Net(graph, image, label, logits, loss)


def minimise(net: Net, optimizer: tf1.train.Optimizer | None = None, decay: float = 0.0) -> tf.Operation:
    """The training operator, batch norm updates included."""
    with net.graph.as_default():
        loss = net.loss
        if decay:
            loss += decay * tf.add_n([tf.nn.l2_loss(v) for v in tf1.trainable_variables() if "kernel" in v.name])
        with tf.control_dependencies(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)):
            return (optimizer or tf1.train.MomentumOptimizer(0.05, 0.9)).minimize(loss)


def data(count: int = 16, side: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((count, side, side, 3), dtype=np.float32), random.integers(0, 5, count)


def freeze(net: Net, session: tf1.Session, path: str, outputs: tuple[str, ...] = ("logits",)) -> tf1.GraphDef:
    frozen = tf1.graph_util.convert_variables_to_constants(session, net.graph.as_graph_def(), list(outputs))
    with open(path, "wb") as stream:
        stream.write(frozen.SerializeToString())
    return frozen


def run(graph_def: tf1.GraphDef, image: np.ndarray, output: str = "logits:0") -> np.ndarray:
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        with tf1.Session(graph=graph) as session:
            return session.run(output, {"image:0": image})


CHANNELS = (
    "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"
)
PATTERN = "prune_config { n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: M4N2 update_freq: %d } } }"
QUANT = """
retrain_data_quant_config { ulq_quantize { } }
retrain_weight_quant_config { %s { channel_wise: %s } }
"""
