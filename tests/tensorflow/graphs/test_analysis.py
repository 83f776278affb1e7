"""What an analysis says of training graphs, costs, open lengths and operators without a rule."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from micro_graphs import GRAPHS, conv, head, weight  # noqa: E402

from openwork.graph.groups import Role  # noqa: E402
from openwork.tensorflow.analysis import analyze_graph  # noqa: E402
from openwork.tensorflow.graphs import BATCH  # noqa: E402
from openwork.tensorflow.pruning import prune_graph  # noqa: E402
from openwork.tensorflow.verification import run_graph, verify_graph  # noqa: E402

v1 = tf.compat.v1


def variable(name, *shape, resource):
    values = np.random.default_rng(0).normal(size=shape).astype("f")
    return v1.get_variable(name, initializer=values, use_resource=resource)


def network(x, training, resource):
    """Convolutions with batch norms that switch by is_training, a residual sum, an L2 term and an optimizer."""

    def block(y, name):
        filters = variable(f"{name}/w", 3, 3, y.shape[-1], 8, resource=resource)
        y = tf.nn.conv2d(y, filters, 1, "SAME", name=f"{name}/conv")
        vectors = {key: variable(f"{name}/{key}", 8, resource=resource) for key in ("gamma", "beta", "mean", "var")}

        def train():
            return v1.nn.fused_batch_norm(y, vectors["gamma"], vectors["beta"], is_training=True)[0]

        def infer():
            out, _, _ = v1.nn.fused_batch_norm(
                y, vectors["gamma"], vectors["beta"], vectors["mean"], tf.abs(vectors["var"]), is_training=False
            )
            return out

        return tf.nn.relu(v1.cond(training, train, infer)), filters

    y, first = block(x, "one")
    z, second = block(y, "two")
    z = v1.nn.dropout(y + z, rate=0.5)
    flat = tf.reshape(z, [-1, 4 * 4 * 8])
    kernel = variable("fc/w", 128, 3, resource=resource)
    return tf.matmul(flat, kernel, name="out"), [first, second, kernel]


def described(analysis):
    return [
        sorted((m.parameter, m.axis, m.role.value, len(m.positions)) for m in group.members)
        for group in analysis.groups
    ]


@pytest.mark.parametrize("resource", [False, True])
def test_training_graphs_have_the_groups_of_the_frozen_one(resource):
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [None, 4, 4, 3], name="x")
            training = v1.placeholder(tf.bool, name="is_training")
            out, weights = network(x, training, resource)
            loss = tf.reduce_mean(out**2) + 1e-4 * sum(tf.nn.l2_loss(w) for w in weights)
            v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                frozen = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), ["out"])
    finally:
        v1.enable_control_flow_v2()
    live, dead = analyze_graph(graph, ["out"]), analyze_graph(frozen, ["out"])
    assert described(live) == described(dead)
    (group,) = live.groups
    assert {(m.parameter, m.axis) for m in group.members} == {
        ("one/w", 3), ("two/w", 3), ("two/w", 2), ("fc/w", 0),
        *((f"{name}/{key}", 0) for name in ("one", "two") for key in ("gamma", "beta", "mean", "var")),
    }  # fmt: skip
    kinds = {source.kind for name, source in live.sources.items() if not name.startswith("Const")}
    assert {"resource" if resource else "ref"} <= kinds
    assert live.layers["two/conv"].weight.name == "two/w"
    assert {m.module for m in group.producers} == {"one/conv", "two/conv"}
    smaller, _ = prune_graph(frozen, ["out"])
    feeds = {"x:0": np.random.default_rng(1).normal(size=(2, 4, 4, 3)), "is_training:0": False}
    for feeds["is_training:0"] in (False, True):
        # Dropout draws anew in each run, so only shapes can be compared.
        assert run_graph(smaller, ["out:0"], feeds)[0].shape == (2, 3)


def test_costs_are_those_of_one_sample_and_of_the_cut_graph():
    original = GRAPHS["grouped"].graph_def()
    analysis = analyze_graph(original, ["out"])
    # 8 x 8 places: 3x3 filters from 3 to 8, from 8 to 8 in two groups, from 8 to 6; then 6 to 4.
    assert analysis.macs == 64 * 9 * (3 * 8 + 8 * 8 // 2 + 8 * 6) + 6 * 4
    assert analysis.params == 9 * (3 * 8 + 4 * 8 + 8 * 6) + 8 + 8 + 6 + 6 * 4 + 4
    smaller, plan = prune_graph(original, ["out"], analysis=analysis)
    kept = np.array([group.units for group in analysis.groups])
    for cut in plan.groups:
        kept[cut.index] = cut.units_after
    after = analyze_graph(smaller, ["out"])
    for kind, value in (("macs", after.macs), ("params", after.params)):
        assert round(sum(t.value(kept) for t in analysis.costs if t.kind == kind)) == value
    assert analyze_graph(original, ["out"], {"x0": (2, 8, 8, 3)}).macs == 2 * analysis.macs


def test_open_lengths_of_images_are_made_up():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, None, None, 3], name="x0")
        y = tf.nn.max_pool2d(conv(x, "a", 8, strides=2), 2, 2, "VALID")
        size = tf.shape(y)
        y = tf.reshape(y, [size[0], size[1] * size[2], 8])
        tf.identity(tf.matmul(tf.reduce_mean(y, 1), weight("head/w", 8, 4)), name="out")
    original = graph.as_graph_def()
    analysis = analyze_graph(original, ["out"])
    assert analysis.labels["x0:0"].shape[0] == BATCH
    smaller, plan = prune_graph(original, ["out"], analysis=analysis)
    for size in (16, 24):
        feeds = {"x0:0": np.random.default_rng(0).normal(size=(2, size, size, 3))}
        assert verify_graph(original, smaller, plan, ["out"], feeds) <= 1e-4


def test_operators_without_a_rule_hold_their_channels_and_are_named():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 8, 8, 3], name="x0")
        y = tf.raw_ops.Betainc(a=conv(x, "a", 8), b=1.0, x=0.5, name="strange")
        tf.identity(head(conv(y, "b", 6)), name="out")
    analysis = analyze_graph(graph, ["out"])
    reasons = {(name, axis): frozen.reason for frozen in analysis.frozen for name, axis, _ in frozen.members}
    assert reasons["a/w", 3] == "no rule for this operator (Betainc strange)"
    assert reasons["b/w", 2].startswith("reads channels that are fixed")
    assert any(m.parameter == "b/w" and m.role is Role.PRODUCES for group in analysis.groups for m in group.members)


def test_the_table_names_operators_and_reasons():
    text = str(analyze_graph(GRAPHS["residual"].graph_def(), ["out"]))
    assert "a, b" in text
    assert "the caller sees these channels (output of the graph)" in text
