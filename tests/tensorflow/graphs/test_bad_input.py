"""One clear line for whatever is wrong with a graph, its outputs, its feeds or its file."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from micro_graphs import GRAPHS, conv, dense, head, weight  # noqa: E402

from openwork.errors import ConfigError, FileError, ModelError, NothingToPruneError  # noqa: E402
from openwork.tensorflow.analysis import analyze_graph  # noqa: E402
from openwork.tensorflow.graphs import first_line, read_frozen  # noqa: E402
from openwork.tensorflow.pruning import prune_graph  # noqa: E402
from openwork.tensorflow.verification import verify_graph  # noqa: E402

v1 = tf.compat.v1


@pytest.fixture(scope="module")
def chain():
    return GRAPHS["chain"].graph_def()


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], r"outputs is \[\]; a list of names"),
        (None, "outputs is None; a list of names"),
        (["oout"], "outputs: 'oout' is not in the graph; did you mean 'out'"),
        (["out:x"], "outputs: 'out:x' is no name of a tensor; allowed: 'name' or 'name:0'"),
        ([3], "outputs: 3 is no name of an operator or tensor"),
    ],
)
def test_outputs(chain, outputs, message):
    with pytest.raises(ConfigError, match=message):
        analyze_graph(chain, outputs)


def test_an_output_that_an_operator_does_not_have(chain):
    with pytest.raises(ConfigError, match="outputs: 'out:3': operator 'out' has 1 output"):
        analyze_graph(chain, ["out:3"])


def test_no_graph():
    with pytest.raises(ConfigError, match=r"graph is a str; a tf\.Graph or a GraphDef is needed"):
        analyze_graph("model.pb", ["out"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"x": (1, 8, 8, 3)}, "sizes: 'x' is no placeholder of the graph; did you mean 'x0'"),
        ({"x0": (1, 8, 8, 4)}, r"input 'x0' has shape \[1, 8, 8, 4\]; the graph says \[-1, 8, 8, 3\]"),
        ({"x0": (1, 8, 8)}, r"input 'x0' has shape \[1, 8, 8\]; the graph says \[-1, 8, 8, 3\]"),
    ],
)
def test_sizes(chain, sizes, message):
    with pytest.raises(ConfigError, match=message):
        analyze_graph(chain, ["out"], sizes)


def test_an_inconsistent_graph_is_named(chain):
    broken = tf.compat.v1.GraphDef()
    broken.CopyFrom(chain)
    next(node for node in broken.node if node.name == "a").input[1] = "missing"
    with pytest.raises(ModelError, match=r"the graph cannot be imported: .*missing"):
        analyze_graph(broken, ["out"])


def test_a_weight_behind_a_placeholder_holds_what_it_meets():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 8, 8, 3], name="x")
        fed = v1.placeholder(tf.float32, [3, 3, 8, 6], name="fed")
        y = tf.nn.conv2d(conv(x, "a", 8), fed, 1, "SAME", name="b")
        tf.identity(head(conv(y, "c", 4)), name="out")
    analysis = analyze_graph(graph, ["out"])
    reasons = {name: frozen.reason for frozen in analysis.frozen for name, _, _ in frozen.members}
    assert reasons["a/w"].startswith(("convolved with an axis of fixed length", "reads channels"))
    assert "b" not in analysis.layers
    assert "c" in analysis.layers


def test_types_that_are_no_floats_are_left_alone():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.int32, [None, 6], name="x")
        y = tf.matmul(x, tf.constant(np.ones((6, 8)), tf.int32, name="w"))
        tf.matmul(y, tf.constant(np.ones((8, 2)), tf.int32), name="out")
    with pytest.raises(NothingToPruneError, match="no channel may be removed"):
        prune_graph(graph.as_graph_def(), ["out"])


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_other_float_types_are_cut(dtype):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(dtype, [None, 6], name="x")
        y = tf.nn.relu(tf.matmul(x, tf.cast(weight("w", 6, 8), dtype)))
        values = np.random.default_rng(0).normal(size=(8, 8))
        y = tf.nn.relu(tf.matmul(y, tf.constant(values, dtype, name="v")))
        tf.matmul(y, tf.constant(values[:, :2], dtype, name="u"), name="out")
    smaller, _ = prune_graph(graph.as_graph_def(), ["out"])
    (found,) = [node for node in smaller.node if node.name == "v"]
    assert tf.as_dtype(found.attr["dtype"].type) is dtype
    assert tf.make_ndarray(found.attr["value"].tensor).shape == (4, 4)


def test_nothing_to_prune_says_why():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        tf.identity(dense(x, "a", 4), name="out")
    with pytest.raises(NothingToPruneError, match="the caller sees these channels"):
        prune_graph(graph.as_graph_def(), ["out"])


def test_variables_must_be_frozen_first():
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        tf.matmul(x, v1.get_variable("w", [6, 4]), name="out")
    with pytest.raises(ModelError, match="'w' is a variable; freeze the graph before it is pruned"):
        prune_graph(graph.as_graph_def(), ["out"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0}, "ratio is 0; it must be greater than 0 and less than 1"),
        ({"ratio": float("nan")}, "ratio is nan"),
        ({"round_to": 0}, "round_to is 0; it must be an integer of at least 1"),
        ({"skip": ["aa"]}, "skip: 'aa' is no operator or scope of the graph"),
        ({"groups": {7: [0]}}, r"groups: 7 is no group; allowed: 0\.\.1"),
        ({"groups": {0: [99]}}, r"groups\[0\]: unit 99 is not in 0\.\.7"),
        ({"importance": "l9"}, "l9"),
    ],
)
def test_options_of_pruning(chain, options, message):
    with pytest.raises(ConfigError, match=message):
        prune_graph(chain, ["out"], **options)


def test_feeds_of_verification(chain):
    smaller, plan = prune_graph(chain, ["out"])
    with pytest.raises(ConfigError, match="feeds: 'y:0' is no placeholder"):
        verify_graph(chain, smaller, plan, ["out"], {"y:0": np.zeros((1, 8, 8, 3))})
    with pytest.raises(ConfigError, match=r"input 'x0' has shape \[1, 8, 8, 4\]"):
        verify_graph(chain, smaller, plan, ["out"], {"x0:0": np.zeros((1, 8, 8, 4))})
    with pytest.raises(ConfigError, match="feeds: placeholder 'x0' is not fed"):
        verify_graph(chain, smaller, plan, ["out"], {})
    assert verify_graph(chain, smaller, plan, ["out"], {"x0": np.ones((1, 8, 8, 3))}) <= 1e-4  # with or without :0


def test_files(chain, tmp_path):
    path = tmp_path / "model.pb"
    content = chain.SerializeToString()
    path.write_bytes(content)
    assert len(read_frozen(path).node) == len(chain.node)
    for length in (1, len(content) // 3, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(FileError, match="is no frozen graph, or it is truncated"):
            read_frozen(path)
    path.write_bytes(b"")
    with pytest.raises(FileError, match="has no nodes"):
        read_frozen(path)
    path.write_bytes(np.random.default_rng(0).bytes(999))
    with pytest.raises(FileError, match="is no frozen graph"):
        read_frozen(path)
    with pytest.raises(FileError, match="is a folder"):
        read_frozen(tmp_path)
    with pytest.raises(FileError, match="does not exist"):
        read_frozen(tmp_path / "none.pb")
    with tf.Graph().as_default() as graph:
        v1.get_variable("w", [6, 4])
    path.write_bytes(graph.as_graph_def().SerializeToString())
    with pytest.raises(FileError, match="is not frozen: 'w' is a variable"):
        read_frozen(path)


def test_weights_that_are_not_finite_are_named(chain):
    broken = tf.compat.v1.GraphDef()
    broken.CopyFrom(chain)
    node = next(node for node in broken.node if node.name == "a/w")
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.full((3, 3, 3, 8), np.nan, "f")))
    with pytest.raises(ValueError, match="a/w: 216 of 216 values are NaN or infinite"):
        prune_graph(broken, ["out"])


def test_the_reason_is_taken_from_an_error_of_a_session():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, None], name="x")
        y = tf.matmul(x, tf.constant(np.ones((3, 2), np.float32)), name="out")
        with tf.compat.v1.Session() as session, pytest.raises(tf.errors.InvalidArgumentError) as caught:
            session.run(y, {x: np.ones((1, 4))})
    assert first_line(caught.value) == "Matrix size-incompatible: In[0]: [1,4], In[1]: [3,2]"


@pytest.mark.parametrize(
    ("given", "words"),
    [({"skip": None}, "a list of paths"), ({"skip": [3]}, "a list of paths"), ({"groups": [1]}, "a dict is needed")],
)
def test_arguments_of_another_kind(chain, given, words):
    with pytest.raises(ConfigError, match=words):
        prune_graph(chain, ["out"], **given)
