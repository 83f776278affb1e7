"""The search on training graphs: gradients as the optimizer sees them, in inference behaviour, nothing updated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from networks import CHANNELS, data, minimise, residual  # noqa: E402

import openwork.tensorflow as amct  # noqa: E402
from openwork.config import load_retrain_config, read_chosen_channels  # noqa: E402
from openwork.errors import ConfigError, ModelError, WeightsError  # noqa: E402
from openwork.search import SearchChannelBase, SensitivityBase, get_attribute, set_attribute  # noqa: E402
from openwork.tensorflow.feeds import pieces_of  # noqa: E402
from openwork.tensorflow.inference import InferenceCopy, variables_behind  # noqa: E402
from openwork.tensorflow.search._graph import SearchGraph  # noqa: E402
from openwork.tensorflow.variables import Values, gradients, read_values  # noqa: E402

tf1 = tf.compat.v1
SEARCH = "compress_ratio: 1.5\nascend_optimized: false\n"


class Recorded(SensitivityBase):
    """A user's class: keeps what it was given, and scores by position."""

    def setup_initialization(self, graph_tuple, input_data, test_iteration, output_nodes=None):
        self.graph, self.graph_info = graph_tuple
        self.given = input_data, test_iteration, output_nodes

    def get_sensitivity(self, search_records):
        for record in search_records:
            node = record.producer[0]
            count = get_attribute(node, "end") - get_attribute(node, "begin")
            set_attribute(node, "sensitivity", [float(place + 1) for place in range(count)])


class HalfOfEach(SearchChannelBase):
    """A user's class: removes the first half of every layer."""

    def channel_prune_search(self, graph_info, search_records, prune_config):
        widths = {node.name: int(graph_info[node.name]["ori_cout"]) for r in search_records for node in r.producer}
        return {name: [int(place >= width // 2) for place in range(width)] for name, width in widths.items()}


def search(tmp_path: Path, net: Any, text: str = SEARCH, feeds: Any = None, **how: Any) -> Any:
    (tmp_path / "search.cfg").write_text(text)
    images, labels = data()
    feeds = [{"image:0": images, "label:0": labels}] if feeds is None else feeds
    amct.auto_channel_prune_search(net.graph, ["logits"], tmp_path / "search.cfg", feeds, tmp_path / "out.cfg", **how)
    return load_retrain_config(tmp_path / "out.cfg")


def inference_gradient(weights: dict[str, np.ndarray], name: str, feed: dict[str, np.ndarray]) -> np.ndarray:
    """The gradient of the loss by a variable in a network that is built for inference, from scratch."""
    net = residual(False, resource=False)
    with net.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        variables = {v.op.name: v for v in tf1.global_variables()}
        for key, value in weights.items():
            variables[key].load(value, session)
        slope = tf1.gradients(net.loss, variables[name])[0]
        return session.run(slope, {net.image: feed["image:0"], net.label: feed["label:0"]})


@pytest.mark.parametrize(
    ("optimizer", "resource"),
    [("Momentum", True), ("Adam", True), ("Ftrl", True), ("GradientDescent", False), ("RMSProp", False),
     ("Adagrad", False), ("Adadelta", False)],
)  # fmt: skip
def test_gradients_are_those_of_inference(optimizer: str, resource: bool) -> None:
    net = residual(True, resource)
    made = getattr(tf1.train, f"{optimizer}Optimizer")(*((0.05, 0.9) if optimizer == "Momentum" else (0.01,)))
    minimise(net, made)
    images, labels = data()
    feed = {"image:0": images, "label:0": labels}
    found = gradients(net.graph)
    names = ["stem/kernel", "first_bn/gamma", "second/kernel", "head/bias"]
    tensors = [found[name][0].tensor.name for name in names]
    graph_def = net.graph.as_graph_def()
    values = read_values(net.graph, [v.op.name for v in net.graph.get_collection("variables")])
    copy = InferenceCopy(graph_def, tensors, values)
    own = {key: value for key, value in values.items() if key.split("/")[-1] in
           ("kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance")}  # fmt: skip
    for name, slope in zip(names, copy.run(tensors, feed), strict=True):
        np.testing.assert_allclose(slope, inference_gradient(own, name, feed), atol=2e-6, err_msg=name)


def test_wrapped_gradients_are_seen_as_they_are(tmp_path: Path) -> None:
    """Clipping, scaling and an L2 term stand between the loss and the optimizer."""
    net = residual(True)
    with net.graph.as_default():
        optimizer = tf1.train.AdamOptimizer(0.01)
        kernel = next(v for v in tf1.trainable_variables() if v.op.name == "stem/kernel")
        pairs = optimizer.compute_gradients(1024.0 * (net.loss + 0.5 * tf.nn.l2_loss(kernel)))
        scaled = [(gradient / 1024.0, variable) for gradient, variable in pairs]
        clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in scaled], 1e-2)
        optimizer.apply_gradients(zip(clipped, [variable for _, variable in scaled], strict=True))
    found = gradients(net.graph)
    tensor = found["stem/kernel"][0].tensor.name
    values = read_values(net.graph, variables_behind(net.graph.as_graph_def(), [tensor]))
    images, labels = data()
    slopes = InferenceCopy(net.graph.as_graph_def(), [g[0].tensor.name for g in found.values()], read_values(
        net.graph, [v.op.name for v in net.graph.get_collection("variables")])
    ).run([g[0].tensor.name for g in found.values()], {"image:0": images, "label:0": labels})  # fmt: skip
    assert np.sqrt(sum((slope.astype(np.float64) ** 2).sum() for slope in slopes)) == pytest.approx(1e-2, rel=1e-4)
    assert "stem/kernel" in values


def test_nothing_changes_and_no_update_runs(tmp_path: Path) -> None:
    net = residual(True)
    minimise(net)  # its gradients hang on the updates of the moving statistics
    with net.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        before = session.run(tf1.global_variables())
        nodes = len(net.graph.get_operations())
        net.graph.finalize()
        search(tmp_path, net)
        search(tmp_path, net, session=session)
        for old, new in zip(before, session.run(net.graph.get_collection("variables")), strict=True):
            assert (old == new).all()
        assert len(net.graph.get_operations()) == nodes
    assert (tmp_path / "report.html").read_text().startswith("<!")


def test_the_session_decides_whose_weights_count(tmp_path: Path) -> None:
    net = residual(True)
    minimise(net)
    chosen = []
    with net.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        for weak in (3, 11):
            first = next(v for v in tf1.trainable_variables() if v.op.name == "first/kernel")
            value = np.ones(first.shape.as_list(), np.float32)
            value[..., weak] = 1e-3
            first.load(value, session)
            search(tmp_path, net, SEARCH.replace("1.5", "1.02"), sensitivity="MagnitudeSensitivity", session=session)
            chosen.append((tmp_path / "out.cfg").read_text())
    for text, weak in zip(chosen, (3, 11), strict=True):
        config = load_retrain_config(tmp_path / "out.cfg")
        settings = {item.name: item.prune for item in config.override_layer_configs}
        assert read_chosen_channels(text, settings).removed["first/Conv2D"].tolist() == [weak]  # type: ignore[arg-type]


def test_initial_values_are_drawn_once(tmp_path: Path) -> None:
    """Without a session and without seeds, weights and gradients are still those of one network."""
    net = residual(True)
    net.graph.seed = None
    with net.graph.as_default():
        table = tf1.get_variable("free", [4, 4], initializer=tf1.random_normal_initializer())
        tf1.train.GradientDescentOptimizer(0.1).minimize(net.loss + tf.nn.l2_loss(table))
    values = Values(net.graph)
    tensor = gradients(net.graph)["free"][0].tensor.name
    first = values.read(["free"])["free"]
    names = variables_behind(net.graph.as_graph_def(), [tensor])
    (slope,) = InferenceCopy(net.graph.as_graph_def(), [tensor], values.read(names)).run([tensor], {})
    assert (slope == first).all()
    assert (read_values(net.graph, ["free"])["free"] != first).any(), "the test proves nothing with a fixed seed"


@pytest.mark.parametrize("algorithm", ["GreedySearch", "DynamicProgrammingSearch"])
@pytest.mark.parametrize(
    "sensitivity",
    ["TaylorLossSensitivity", "FisherSensitivity", "MagnitudeSensitivity", "FisherMagnitudeSensitivity",
     "OutputChangeSensitivity"],
)  # fmt: skip
def test_every_sensitivity_reaches_the_target(tmp_path: Path, sensitivity: str, algorithm: str) -> None:
    net = residual(True, resource=algorithm == "GreedySearch")
    minimise(net)
    config = search(tmp_path, net, sensitivity=sensitivity, search_alg=algorithm)
    (tmp_path / "record.txt").unlink(missing_ok=True)
    fresh = residual(False)
    amct.create_prune_retrain_model(fresh.graph, ["logits"], tmp_path / "record.txt", tmp_path / "out.cfg")
    kept = {item.name: 1 - item.prune.ratio for item in config.override_layer_configs}  # type: ignore[union-attr]
    stem, first = (round(n * kept.get(f"{name}/Conv2D", 1)) for name, n in (("stem", 16), ("first", 24)))
    macs = 64 * 9 * (3 * stem + 2 * stem * first) + 5 * stem
    full = 64 * 9 * (3 * 16 + 2 * 16 * 24) + 5 * 16
    assert 1.5 <= full / macs * (1 + 1e-9) < 1.65


@pytest.mark.parametrize("cost", ["MACS", "PARAMS", "ACTIVATION_MEMORY", "LATENCY"])
def test_every_cost(tmp_path: Path, cost: str) -> None:
    net = residual(True)
    minimise(net)
    config = search(tmp_path, net, SEARCH.replace("1.5", "1.2") + f"cost: {cost}", sensitivity="MagnitudeSensitivity")
    assert config.override_layer_configs


def test_output_change_is_the_change_of_the_output(tmp_path: Path) -> None:
    """Against a network in which the unit's reading weights are set to zero through the session."""
    from openwork.tensorflow.search import OutputChangeSensitivity

    class Kept(OutputChangeSensitivity):
        def scores(self, groups):
            self.found = {group.producers[0].module: scores for group, scores in zip(groups, super().scores(groups))}
            return [self.found[group.producers[0].module] for group in groups]

    net, scorer = residual(True), Kept()
    minimise(net)
    search(tmp_path, net, sensitivity=scorer)
    plain = residual(False)
    images, _ = data()
    with plain.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        before = session.run(plain.logits, {plain.image: images})
        second = next(v for v in tf1.trainable_variables() if v.op.name == "second/kernel")
        value = session.run(second)
        for unit in (0, 7, 23):
            changed = value.copy()
            changed[:, :, unit] = 0
            second.load(changed, session)
            moved = session.run(plain.logits, {plain.image: images}) - before
            assert scorer.found["first/Conv2D"][unit] == pytest.approx((moved**2).mean(), rel=1e-4)


def test_users_own_classes(tmp_path: Path) -> None:
    net, scorer = residual(True), Recorded()
    minimise(net)
    search(tmp_path, net, sensitivity=scorer, search_alg=HalfOfEach)
    assert scorer.graph is net.graph
    assert scorer.given[1:] == (1, ["logits:0"])
    assert scorer.graph_info["first/Conv2D"]["cin"] == 16
    text = (tmp_path / "out.cfg").read_text()
    assert "# openwork-channels: first/Conv2D of 24 remove 0-11 " in text
    fresh = residual(True)
    amct.create_prune_retrain_model(fresh.graph, ["logits"], tmp_path / "record.txt", tmp_path / "out.cfg")
    with fresh.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        alive = session.run("openwork_ops/channels/first/Conv2D/0/alive:0")
    assert alive.tolist() == [0.0] * 12 + [1.0] * 12


def test_several_feeds_and_a_fixed_batch(tmp_path: Path) -> None:
    net = residual(True, batch=4)
    minimise(net)
    feeds = [dict(zip(("image:0", "label:0"), data(4, seed=seed), strict=True)) for seed in range(3)]
    search(tmp_path, net, SEARCH + "test_iteration: 3", feeds)
    with pytest.raises(ConfigError, match="test_iteration is 4; input_data holds 3 feed_dicts"):
        search(tmp_path, net, SEARCH + "test_iteration: 4", feeds)


def test_dropout_keeps_everything_while_measuring(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf1.placeholder(tf.float32, [None, 6], name="x")
        w = tf1.get_variable("w", [6, 5])
        v = tf1.get_variable("v", [5, 3])
        hidden = tf1.nn.dropout(tf.nn.relu(tf.matmul(x, w)), rate=0.5)
        loss = tf.reduce_sum(tf.matmul(hidden, v) ** 2)
        tf1.train.GradientDescentOptimizer(0.1).minimize(loss)
    values = read_values(graph, ["w", "v"])
    tensor = gradients(graph)["w"][0].tensor.name
    inputs = np.random.default_rng(0).standard_normal((4, 6), dtype=np.float32)
    (slope,) = InferenceCopy(graph.as_graph_def(), [tensor], values).run([tensor], {"x:0": inputs})
    before = inputs @ values["w"]
    outer = 2 * (np.maximum(before, 0) @ values["v"]) @ values["v"].T * (before > 0)
    np.testing.assert_allclose(slope, inputs.T @ outer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("resource", [False, True])
def test_gathered_variables(resource: bool) -> None:
    """An embedding: its gradient is sparse, and reaches the rows that were looked up."""
    graph = tf.Graph()
    with graph.as_default():
        words = tf1.placeholder(tf.int32, [None, 3], name="words")
        table = tf1.get_variable("table", [7, 4], use_resource=resource)
        head = tf1.get_variable("head", [4, 2], use_resource=resource)
        loss = tf.reduce_sum(tf.matmul(tf.reduce_sum(tf.nn.embedding_lookup(table, words), 1), head) ** 2)
        tf1.train.AdagradOptimizer(0.1).minimize(loss)
    source = Values(graph)
    values = source.read(["table", "head"])
    analysis = amct.analyze_graph(graph, [loss.op.name])
    found = SearchGraph(graph, analysis, lambda name: values[name], source).gradients(["table", "head"])
    given = np.array([[1, 1, 5], [0, 5, 2]])
    slopes = found.at({"words:0": given})
    summed = values["table"][given].sum(1)
    outer = 2 * summed @ values["head"] @ values["head"].T
    expected = np.zeros((7, 4), np.float32)
    for row, places in zip(outer, given, strict=True):
        np.add.at(expected, places, row)
    np.testing.assert_allclose(slopes["table"], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(slopes["head"], 2 * summed.T @ (summed @ values["head"]), rtol=1e-4, atol=1e-6)


def test_feeds_are_cut_along_open_lengths_only() -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf1.placeholder(tf.float32, [None, 4], name="image")
        tf1.placeholder(tf.float32, [5], name="classes")
        tf1.placeholder(tf.bool, [], name="switch")
        tf1.placeholder(tf.float32, name="free")
    feed = {"image:0": np.zeros((6, 4)), "classes:0": np.arange(5), "switch:0": np.array(True), "free:0": np.arange(6)}
    pieces = pieces_of(graph, feed, 4)
    assert [len(piece["image:0"]) for piece in pieces] == [4, 2]
    assert pieces[1]["free:0"].tolist() == [4, 5]
    assert all(piece["classes:0"] is feed["classes:0"] for piece in pieces)
    assert pieces_of(graph, {**feed, "image:0": np.zeros((5, 4)), "free:0": np.zeros(5)}, 2)[0]["image:0"].shape == (
        5,
        4,
    )
    assert pieces_of(graph, {**feed, "free:0": np.zeros(7)}, 2)[0]["image:0"].shape == (6, 4)


def test_a_graph_that_is_masked_already(tmp_path: Path) -> None:
    """Dead channels have no gradient; the others are scored as ever."""
    net = residual(True)
    (tmp_path / "c.cfg").write_text(CHANNELS)
    amct.create_prune_retrain_model(net.graph, ["logits"], tmp_path / "record.txt", tmp_path / "c.cfg")
    minimise(net)
    search(tmp_path, net)
    assert (tmp_path / "out.cfg").exists()


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ([], "input_data is an empty list"),
        (7, "input_data is a int; a list of feed_dicts is needed"),
        ([[1]], r"input_data\[0\] is a list"),
        ([{}], r"input_data\[0\] is empty"),
        ([{"image": 0}], "'image' is an operator; its tensor is needed: 'image:0'"),
        ([{"imgae:0": 0}], "'imgae:0' is not in the graph; did you mean 'image'"),
        ([{"image:3": 0}], "did you mean 'image:0'"),
        ([{"image:0": np.zeros((2, 9, 8, 3))}], r"has shape \[2, 9, 8, 3\]; the graph needs \[any, 8, 8, 3\]"),
        ([{"image:0": "text"}], "is no float32 array"),
    ],
)
def test_wrong_feeds(tmp_path: Path, feeds: Any, words: str) -> None:
    net = residual(True)
    minimise(net)
    with pytest.raises(ConfigError, match=words):
        search(tmp_path, net, feeds=feeds)


def test_a_feed_that_lacks_a_placeholder(tmp_path: Path) -> None:
    net = residual(True)
    minimise(net)
    with pytest.raises(ConfigError, match="input_data does not feed the placeholder 'label'"):
        search(tmp_path, net, feeds=[{"image:0": data()[0]}])


def test_feeds_that_the_graph_fails_on(tmp_path: Path) -> None:
    net = residual(True)
    minimise(net)
    with pytest.raises(ModelError, match=r"the graph fails on input_data: .*label value of 9"):
        search(tmp_path, net, feeds=[{"image:0": data()[0], "label:0": np.full(16, 9)}])


def test_no_optimizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no optimizer operator .* build them first, e\.g\. .*minimize"):
        search(tmp_path, residual(True))


def test_variables_without_values(tmp_path: Path) -> None:
    net = residual(True)
    minimise(net)
    with tf1.Session(graph=net.graph) as session, pytest.raises(ConfigError, match="has no value in the session"):
        search(tmp_path, net, session=session)
    with tf1.Session(graph=tf.Graph()) as session, pytest.raises(ConfigError, match="session runs another graph"):
        search(tmp_path, net, session=session)


def test_infinite_gradients_are_named(tmp_path: Path) -> None:
    net = residual(True)
    minimise(net)
    images, labels = data()
    images[0] = np.inf
    with pytest.raises(WeightsError, match="gradient of"):
        search(tmp_path, net, feeds=[{"image:0": images, "label:0": labels}])


def test_wrong_outputs(tmp_path: Path) -> None:
    net = residual(True)
    minimise(net)
    (tmp_path / "search.cfg").write_text(SEARCH)
    feed = [dict(zip(("image:0", "label:0"), data(), strict=True))]
    for outputs, words in ((["logist"], "did you mean 'logits'"), ([], "outputs is")):
        with pytest.raises(ConfigError, match=words):
            amct.auto_channel_prune_search(net.graph, outputs, tmp_path / "search.cfg", feed, tmp_path / "out.cfg")


@pytest.mark.parametrize("resource", [True, False])
def test_a_wrong_output_is_answered_with_operators_of_the_network(tmp_path: Path, resource: bool) -> None:
    net = residual(True, resource)
    minimise(net, tf1.train.AdamOptimizer(0.01))
    (tmp_path / "search.cfg").write_text(SEARCH)
    for wrong, offered in (("logit", "did you mean 'logits'"), ("AAA", "allowed: 'Relu', 'Relu_1', 'Relu_2', ...")):
        with pytest.raises(ConfigError) as raised:
            amct.auto_channel_prune_search(
                net.graph, [wrong], tmp_path / "search.cfg", [dict(zip(("image:0", "label:0"), data(), strict=True))],
                tmp_path / "out.cfg",
            )  # fmt: skip
        assert str(raised.value).rstrip("?") == f"outputs: {wrong!r} is not in the graph; {offered}"
