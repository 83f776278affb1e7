"""Calls of functions, conditionals and loops inside graphs."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from openwork.tensorflow.analysis import analyze_graph  # noqa: E402
from openwork.tensorflow.functions import inlined  # noqa: E402
from openwork.tensorflow.pruning import prune_graph  # noqa: E402
from openwork.tensorflow.verification import difference, run_graph, verify_graph  # noqa: E402

v1 = tf.compat.v1
RANDOM = np.random.default_rng(0)
W = {name: RANDOM.normal(size=shape).astype("f") for name, shape in {"a": (6, 8), "b": (8, 8), "c": (8, 3)}.items()}
FEEDS = {"x:0": RANDOM.normal(size=(5, 6)).astype("f")}


def graph_of(middle):
    """Three linear layers; `middle` is what happens between the first and the last."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        y = middle(tf.matmul(x, tf.constant(W["a"], name="a")))
        tf.matmul(y, tf.constant(W["c"], name="c"), name="out")
    return graph.as_graph_def()


@tf.function
def inner(y):
    return tf.nn.relu(y), tf.reduce_mean(y)


@tf.function
def outer(y, w):
    first, mean = inner(y)
    return tf.matmul(first, w) + 0.0 * mean, first


def called(y):
    second, first = outer(y, tf.constant(W["b"], name="b"))
    return second + first


def test_functions_are_cut_like_any_operators():
    graph_def = graph_of(called)
    assert {"PartitionedCall", "StatefulPartitionedCall"} & {node.op for node in graph_def.node}
    flat = inlined(graph_def)
    assert difference(*(run_graph(g, ["out:0"], FEEDS)[0] for g in (graph_def, flat))) == 0.0
    smaller, plan = prune_graph(graph_def, ["out"])
    shapes = {n.name: tf.make_ndarray(n.attr["value"].tensor).shape for n in smaller.node if n.op == "Const"}
    assert (shapes["a"], shapes["b"], shapes["c"]) == ((6, 4), (4, 4), (4, 3))
    assert verify_graph(graph_def, smaller, plan, ["out"], FEEDS) <= 1e-4


@pytest.mark.parametrize("kind", ["conditional", "loop"])
def test_bodies_of_conditionals_and_loops_hold_what_they_touch(kind):
    def middle(y):
        if kind == "conditional":
            return tf.cond(tf.reduce_sum(y) > 0.0, lambda: tf.nn.relu(y), lambda: tf.nn.elu(y))
        return tf.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, tf.tanh(z)), (0, y))[1]

    for v2 in (True, False):
        (v1.enable_control_flow_v2 if v2 else v1.disable_control_flow_v2)()
        try:
            graph_def = graph_of(middle)
        finally:
            v1.enable_control_flow_v2()
        analysis = analyze_graph(graph_def, ["out"])
        held = {(name, axis): frozen.reason for frozen in analysis.frozen for name, axis, _ in frozen.members}
        if kind == "conditional" and not v2:
            # Switch and Merge hide nothing.
            assert any(m.parameter == "a" for group in analysis.groups for m in group.members)
            smaller, plan = prune_graph(graph_def, ["out"])
            assert verify_graph(graph_def, smaller, plan, ["out"], FEEDS) <= 1e-4
        else:
            assert ("a", 1) in held


@pytest.mark.parametrize("summed", [False, True])
def test_weights_that_a_loop_reads_too_are_held(summed):
    def middle(y):
        w = tf.constant(W["b"], name="b")
        y = tf.nn.relu(tf.matmul(tf.nn.relu(y), w))

        def body(i, h):
            return i + 1, tf.tanh(h + tf.reduce_sum(tf.exp(w)) if summed else tf.matmul(h, w))

        return v1.while_loop(lambda i, h: i < 2, body, [0, y])[1]

    v1.disable_control_flow_v2()
    try:
        graph_def = graph_of(middle)
    finally:
        v1.enable_control_flow_v2()
    analysis = analyze_graph(graph_def, ["out"])
    held = {(name, axis): frozen.reason for frozen in analysis.frozen for name, axis, _ in frozen.members}
    assert "a loop reads it" in held["b", 0]
    assert "a loop reads it" in held["b", 1]
    assert not any(m.parameter == "b" for group in analysis.groups for m in group.members)
