"""create, freeze and save on graphs of one structure each: the cut file gives what the masked graph gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from networks import CHANNELS, PATTERN, QUANT  # noqa: E402

import openwork.tensorflow as amct  # noqa: E402
from openwork.record import load_record  # noqa: E402
from openwork.sparsity import check  # noqa: E402

tf1 = tf.compat.v1
GRAPHS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {}


def graph(build: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    GRAPHS[build.__name__] = build
    return build


def weight(name: str, shape: list[int], dtype: Any = tf.float32) -> tf.Tensor:
    return tf1.get_variable(name, shape, dtype, tf1.random_normal_initializer(0, 0.3))


def conv(x: tf.Tensor, name: str, outputs: int, groups: int = 1, **how: Any) -> tf.Tensor:
    kernel = weight(f"{name}/w", [3, 3, int(x.shape[-1]) // groups, outputs], x.dtype)
    return tf.nn.conv2d(x, kernel, how.pop("strides", 1), "SAME", name=name, **how)


def head(x: tf.Tensor) -> tf.Tensor:
    x = tf.reduce_mean(x, [1, 2])
    return tf.matmul(x, weight("head/w", [int(x.shape[-1]), 5], x.dtype), name="head")


@graph
def chain(x: tf.Tensor) -> tf.Tensor:
    return head(tf.nn.relu(conv(tf.nn.relu(conv(x, "a", 16)), "b", 24)))


@graph
def concatenation(x: tf.Tensor) -> tf.Tensor:
    return head(conv(tf.nn.relu(tf.concat([conv(x, "a", 8), conv(x, "b", 12)], 3)), "c", 16))


@graph
def depthwise(x: tf.Tensor) -> tf.Tensor:
    y = tf.nn.bias_add(conv(x, "a", 12), weight("a/b", [12]))
    y = tf.nn.depthwise_conv2d(tf.nn.relu(y), weight("d/w", [3, 3, 12, 2]), [1, 1, 1, 1], "SAME", name="d")
    return head(conv(tf.nn.relu(y), "b", 16))


@graph
def grouped(x: tf.Tensor) -> tf.Tensor:
    return head(conv(tf.nn.relu(conv(conv(x, "a", 16), "b", 24, groups=4)), "c", 8))


@graph
def squeeze_and_excite(x: tf.Tensor) -> tf.Tensor:
    y = tf.nn.relu(conv(x, "a", 16))
    gate = tf.matmul(tf.nn.relu(tf.matmul(tf.reduce_mean(y, [1, 2]), weight("s/w", [16, 8]), name="s")),
                     weight("e/w", [8, 16]), name="e")  # fmt: skip
    return head(conv(y * tf.reshape(tf.sigmoid(gate), [-1, 1, 1, 16]), "b", 8))


@graph
def flatten(x: tf.Tensor) -> tf.Tensor:
    y = tf.nn.relu(conv(x, "a", 8, strides=2))
    y = tf.reshape(y, [tf.shape(y)[0], 4 * 4 * 8])
    y = tf.nn.relu(tf.matmul(y, weight("f/w", [128, 32]), name="f"))
    return tf.matmul(y, weight("g/w", [7, 32]), transpose_b=True, name="g")


@graph
def transposed(x: tf.Tensor) -> tf.Tensor:
    y = tf.nn.relu(conv(x, "a", 12, strides=2))
    y = tf.nn.conv2d_transpose(y, weight("t/w", [2, 2, 16, 12]), [tf.shape(y)[0], 8, 8, 16], 2, name="t")
    return head(tf.nn.relu(y))


@graph
def constants(x: tf.Tensor) -> tf.Tensor:
    random = np.random.default_rng(0)
    y = tf.nn.conv2d(x, tf.constant(random.standard_normal((3, 3, 4, 16)), tf.float32, name="k"), 1, "SAME", name="a")
    return head(tf.nn.relu(y))


@graph
def double_precision(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(head(tf.nn.relu(conv(tf.cast(x, tf.float64), "a", 12))), tf.float32)


@graph
def shared(x: tf.Tensor) -> tf.Tensor:
    y, w = tf.nn.relu(conv(x, "a", 8)), weight("s/w", [3, 3, 8, 8])
    y = tf.nn.relu(tf.nn.conv2d(y, w, 1, "SAME", name="s1"))
    return head(tf.nn.relu(tf.nn.conv2d(y, w, 1, "SAME", name="s2")))


@graph
def layer_norm(x: tf.Tensor) -> tf.Tensor:
    y = conv(x, "a", 16)
    mean, variance = tf.nn.moments(y, [3], keepdims=True)
    return head(conv(tf.nn.relu((y - mean) * tf.math.rsqrt(variance + 1e-3)), "b", 12))


def saved(tmp_path: Path, name: str, config: str, resource: bool) -> tuple[np.ndarray, np.ndarray, Any]:
    """Outputs of the masked graph and of the cut file, and the cut file."""
    (tmp_path / "c.cfg").write_text(config)
    image = np.random.default_rng(1).standard_normal((3, 8, 8, 4), dtype=np.float32)
    with tf.Graph().as_default() as made:
        tf1.set_random_seed(0)
        with tf1.variable_scope(tf1.get_variable_scope(), use_resource=resource):
            x = tf1.placeholder(tf.float32, [None, 8, 8, 4], name="image")
            tf.identity(GRAPHS[name](x), name="logits")
        amct.create_prune_retrain_model(made, ["logits"], tmp_path / "record.txt", tmp_path / "c.cfg")
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            expected = session.run("logits:0", {"image:0": image})
            frozen = tf1.graph_util.convert_variables_to_constants(session, made.as_graph_def(), ["logits"])
    (tmp_path / "m.pb").write_bytes(frozen.SerializeToString())
    amct.save_prune_retrain_model(tmp_path / "m.pb", ["logits"], tmp_path / "record.txt", tmp_path / "out")
    small = tf1.GraphDef.FromString((tmp_path / "out.pb").read_bytes())
    with tf.Graph().as_default() as made:
        tf.import_graph_def(small, name="")
        with tf1.Session(graph=made) as session:
            return expected, session.run("logits:0", {"image:0": image}), small


def kernels(graph_def: Any) -> dict[str, np.ndarray]:
    return {
        n.name: tf.make_ndarray(n.attr["value"].tensor)
        for n in graph_def.node
        if n.op == "Const" and n.name.endswith("/w")
    }


@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_channels(tmp_path: Path, name: str, resource: bool) -> None:
    expected, found, small = saved(tmp_path, name, CHANNELS, resource)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    cut = {node.name for record in load_record(tmp_path / "record.txt").channels for node in record.producers}
    assert cut
    if name == "layer_norm":  # zeros would count in the mean
        assert cut == {"b"}
    elif name == "grouped":
        assert kernels(small)["b/w"].shape == (3, 3, 2, 12)
    elif name == "concatenation":
        assert kernels(small)["c/w"].shape == (3, 3, 10, 8)


@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in ("grouped", "depthwise")])
def test_patterns(tmp_path: Path, name: str) -> None:
    expected, found, small = saved(tmp_path, name, PATTERN % 1, True)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    masked = load_record(tmp_path / "record.txt").masks
    assert masked
    axes = {"transposed": {"t": 3}, "flatten": {"g": 1, "f": 0}}.get(name, {})
    for layer in masked:
        array = kernels(small).get(f"{layer}/w")
        if array is not None:
            axis = axes.get(layer, 0 if layer in ("head", "s", "e") else 2)
            assert check(array, axis), layer
            assert (array == 0).any()
    if name == "shared":
        assert not {"s1", "s2"} & set(masked)
        assert (kernels(small)["s/w"] != 0).all()


@pytest.mark.parametrize("wise", ["true", "false"])
@pytest.mark.parametrize("name", ["transposed", "flatten", "double_precision", "constants", "concatenation"])
def test_quantisation(tmp_path: Path, name: str, wise: str) -> None:
    """With channels cut as well: every axis order and type of the layers that can be quantised."""
    (tmp_path / "c.cfg").write_text(CHANNELS + QUANT % ("arq_retrain", wise))
    image = np.random.default_rng(1).standard_normal((3, 8, 8, 4), dtype=np.float32)
    with tf.Graph().as_default() as made:
        tf1.set_random_seed(0)
        x = tf1.placeholder(tf.float32, [None, 8, 8, 4], name="image")
        logits = tf.identity(GRAPHS[name](x), name="logits")
        added = amct.create_compressed_retrain_model(made, tmp_path / "c.cfg", ["logits"], tmp_path / "record.txt")
        step = tf1.train.GradientDescentOptimizer(1e-4).minimize(tf.reduce_mean(logits**2))
        with tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            session.run(step, {"image:0": image})
            expected = session.run("logits:0", {"image:0": image})
            frozen = tf1.graph_util.convert_variables_to_constants(session, made.as_graph_def(), ["logits"])
    assert {"clip_min", "clip_max"} <= {variable.op.name.split("/")[-1] for variable in added}
    (tmp_path / "m.pb").write_bytes(frozen.SerializeToString())
    amct.save_compressed_retrain_model(tmp_path / "m.pb", ["logits"], tmp_path / "record.txt", tmp_path / "out")
    small = tf1.GraphDef.FromString((tmp_path / "out.pb").read_bytes())
    with tf.Graph().as_default() as made:
        tf.import_graph_def(small, name="")
        with tf1.Session(graph=made) as session:
            found = session.run("logits:0", {"image:0": image})
    # A value on the edge between two integers may go either way: half a step at most.
    np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())
    assert np.median(np.abs(found - expected)) <= 1e-5 * np.abs(expected).max()
    integers = {node.name for node in small.node if node.name.endswith("/integers")}
    factors = load_record(tmp_path / "record.txt").factors
    assert len(integers) == len(factors) >= 2
    for factor in factors.values():
        assert (len(factor.scale_w) > 1) == (wise == "true")


def switched() -> tuple[tf.Graph, tf.Tensor]:
    """One graph for training and inference: `is_training` chooses the branch."""
    made = tf.Graph()
    with made.as_default():
        tf1.set_random_seed(0)
        x = tf1.placeholder(tf.float32, [None, 8, 8, 4], name="image")
        training = tf1.placeholder(tf.bool, [], name="is_training")
        y = conv(x, "a", 16)
        gamma, beta = weight("bn/gamma", [16]), weight("bn/beta", [16])
        mean = tf1.get_variable("bn/mean", [16], initializer=tf1.zeros_initializer(), trainable=False)
        variance = tf1.get_variable("bn/variance", [16], initializer=tf1.ones_initializer(), trainable=False)

        def learn() -> tf.Tensor:
            found, batch_mean, batch_variance = tf1.nn.fused_batch_norm(y, gamma, beta)
            updates = [tf1.assign_sub(mean, 0.1 * (mean - batch_mean)),
                       tf1.assign_sub(variance, 0.1 * (variance - batch_variance))]  # fmt: skip
            with tf.control_dependencies(updates):
                return tf.identity(found)

        def use() -> tf.Tensor:
            return tf1.nn.fused_batch_norm(y, gamma, beta, mean, variance, is_training=False)[0]

        logits = tf.identity(head(tf.nn.relu(tf.cond(training, learn, use))), name="logits")
        return made, tf.reduce_sum(logits**2)


def test_batch_norm_behind_a_switch(tmp_path: Path) -> None:
    """Masks hold in both branches; the search feeds the switch as in inference, and updates nothing."""
    feed = {"image:0": np.random.default_rng(0).standard_normal((6, 8, 8, 4)), "is_training:0": False}
    (tmp_path / "c.cfg").write_text(CHANNELS)
    (tmp_path / "s.cfg").write_text("compress_ratio: 1.5\nascend_optimized: false\n")
    tf1.disable_control_flow_v2()
    try:
        made, loss = switched()
        amct.create_prune_retrain_model(made, ["logits"], tmp_path / "record.txt", tmp_path / "c.cfg")
        with made.as_default(), tf1.Session() as session:
            step = tf1.train.GradientDescentOptimizer(0.01).minimize(loss)
            session.run(tf1.global_variables_initializer())
            session.run(step, {**feed, "is_training:0": True})
            variables = {variable.op.name: variable for variable in tf1.global_variables()}
            assert session.run(variables["bn/mean"]).any()
            dead = session.run("openwork_ops/channels/a/0/alive:0") == 0
            before = session.run("logits:0", feed)
            readers = np.where(dead[:, None], 9, session.run(variables["head/w"]))
            variables["head/w"].load(readers.astype(np.float32), session)
            np.testing.assert_allclose(session.run("logits:0", feed), before, atol=1e-6)
        made, loss = switched()
        with made.as_default(), tf1.Session() as session:
            tf1.train.GradientDescentOptimizer(0.01).minimize(loss)
            session.run(tf1.global_variables_initializer())
            amct.auto_channel_prune_search(made, ["logits"], tmp_path / "s.cfg", [feed], tmp_path / "out.cfg")
            amct.auto_channel_prune_search(
                made, ["logits"], tmp_path / "s.cfg", [{**feed, "is_training:0": True}], tmp_path / "out.cfg"
            )
            assert not session.run("bn/mean/Read/ReadVariableOp:0").any()
        assert 'layer_name: "a"' in (tmp_path / "out.cfg").read_text()
    finally:
        tf1.enable_control_flow_v2()
