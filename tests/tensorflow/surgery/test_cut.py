"""Cut graphs against graphs whose weights are masked by hand."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from openwork.errors import ModelError, RecordError  # noqa: E402
from openwork.graph.groups import Role  # noqa: E402
from openwork.graph.plan import Cut, GroupCut, Plan  # noqa: E402
from openwork.tensorflow.analysis import analyze_graph  # noqa: E402
from openwork.tensorflow.surgery import cut, cut_array  # noqa: E402

v1 = tf.compat.v1
RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "c1": RANDOM.normal(size=(3, 3, 3, 8)).astype("f"),
    "c2": RANDOM.normal(size=(3, 3, 8, 8)).astype("f"),
    "fc": RANDOM.normal(size=(4 * 4 * 8, 5)).astype("f"),
}


def build(weights):
    """Convolution, batch norm, residual block, flatten, linear."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 4, 4, 3], name="x")
        scale = tf.constant(np.linspace(1, 2, 8), tf.float32, name="scale")
        y = tf.nn.conv2d(x, tf.constant(weights["c1"], name="c1/w"), 1, "SAME", name="c1")
        y, _, _ = v1.nn.fused_batch_norm(y, scale, scale, mean=scale, variance=scale, is_training=False)
        y = tf.nn.relu(y)
        y = y + tf.nn.relu(tf.nn.conv2d(y, tf.constant(weights["c2"], name="c2/w"), 1, "SAME", name="c2"))
        flat = tf.reshape(y, [-1, 4 * 4 * 8])
        tf.matmul(flat, tf.constant(weights["fc"], name="fc/w"), name="out")
    return graph.as_graph_def()


def run(graph_def, output, feeds):
    with tf.Graph().as_default():
        tf.import_graph_def(graph_def, name="")
        with v1.Session() as session:
            return session.run(output, feeds)


def test_a_residual_net_is_cut_everywhere():
    graph_def = build(WEIGHTS)
    analysis = analyze_graph(graph_def, ["out"])
    (group,) = analysis.groups
    assert {(m.parameter, m.axis, m.role) for m in group.members} >= {
        ("c1/w", 3, Role.PRODUCES),
        ("c2/w", 3, Role.PRODUCES),
        ("c2/w", 2, Role.CONSUMES),
        ("fc/w", 0, Role.CONSUMES),
        ("scale", 0, Role.CARRIES),
    }
    gone = np.array([1, 4, 6])
    plan = Plan(analysis.plan({0: gone}))
    smaller = cut(graph_def, analysis, plan)
    shapes = {n.name: tf.make_ndarray(n.attr["value"].tensor).shape for n in smaller.node if n.op == "Const"}
    assert shapes["c2/w"] == (3, 3, 5, 5)
    assert shapes["fc/w"] == (4 * 4 * 5, 5)
    masked = {name: value.copy() for name, value in WEIGHTS.items()}
    masked["c2"][:, :, gone] = 0
    masked["fc"].reshape(16, 8, 5)[:, gone] = 0
    x = RANDOM.normal(size=(2, 4, 4, 3))
    np.testing.assert_allclose(
        run(smaller, "out:0", {"x:0": x}), run(build(masked), "out:0", {"x:0": x}), rtol=1e-4, atol=1e-4
    )


def test_layers_say_where_their_weights_are():
    layers = analyze_graph(build(WEIGHTS), ["out:0"]).layers
    assert {(name, layer.weight.name, layer.cin, layer.cout) for name, layer in layers.items()} == {
        ("c1", "c1/w", 3, 8),
        ("c2", "c2/w", 8, 8),
        ("out", "fc/w", 128, 5),
    }


def test_grouped_filters_lose_other_positions_in_each_group():
    values = RANDOM.normal(size=(1, 1, 3, 4))  # two groups of three inputs and two outputs
    parts = [
        Cut("w", 2, Role.CONSUMES, 6, 2, np.array([0, 5])),
        Cut("w", 3, Role.PRODUCES, 4, 1, np.array([1, 2])),
    ]
    expected = np.stack([values[0, 0, [1, 2], 0], values[0, 0, [0, 1], 3]], axis=1)[None, None]
    np.testing.assert_array_equal(cut_array(values, parts), expected)


def test_a_plan_of_another_graph_is_refused():
    graph_def = build(WEIGHTS)
    analysis = analyze_graph(graph_def, ["out"])

    def plan(parameter, size):
        return Plan((GroupCut(0, size, size - 1, 1, (Cut(parameter, 3, Role.PRODUCES, size, 1, np.array([0])),)),))

    with pytest.raises(RecordError, match=r"'c3/w' of the plan is not in the graph; did you mean"):
        cut(graph_def, analysis, plan("c3/w", 8))
    with pytest.raises(RecordError, match=r"'c1/w' has shape \[3, 3, 3, 8\]; the plan needs 9 on axis 3"):
        cut(graph_def, analysis, plan("c1/w", 9))


def test_variables_are_not_cut():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        y = tf.matmul(x, v1.get_variable("w", [6, 8]))
        tf.matmul(tf.nn.relu(y), v1.get_variable("v", [8, 2]), name="out")
    analysis = analyze_graph(graph, ["out"])
    plan = Plan(analysis.plan({0: np.array([0])}))
    with pytest.raises(ModelError, match=r"weight 'w' is a variable; freeze the graph"):
        cut(graph.as_graph_def(), analysis, plan)
