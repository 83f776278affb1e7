"""Frozen graphs and SavedModels; needs tensorflow and tf2onnx."""

from __future__ import annotations

import numpy as np
import pytest

from convert_masking import keep_two_of_four
from convert_models import session
from openwork.convert.job import Options, convert, inspect
from openwork.errors import ConversionError

tf = pytest.importorskip("tensorflow")
pytest.importorskip("tf2onnx")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of a frozen graph and a SavedModel with the same 2:4 weights, an input, and TensorFlow's own answers."""
    folder = tmp_path_factory.mktemp("tensorflow")
    rng = np.random.default_rng(0)
    kernel = keep_two_of_four(rng.standard_normal((3, 3, 8, 16)).astype(np.float32), 2)
    first = keep_two_of_four(rng.standard_normal((16, 12)).astype(np.float32), 0)
    second = keep_two_of_four(rng.standard_normal((6, 12)).astype(np.float32), 1)

    def network(x):
        x = tf.nn.relu(tf.nn.conv2d(x, tf.constant(kernel), [1, 1, 1, 1], "SAME", name="conv"))
        x = tf.matmul(tf.reduce_mean(x, [1, 2]), tf.constant(first), name="fc")
        return tf.matmul(x, tf.constant(second), transpose_b=True, name="fc2")

    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 9, 9, 8], name="input")
        tf.identity(network(x), name="output")
    (folder / "frozen.pb").write_bytes(graph.as_graph_def().SerializeToString())
    data = rng.standard_normal((2, 9, 9, 8)).astype(np.float32)
    with tf.compat.v1.Session(graph=graph) as running:
        expected, cut = running.run(["output:0", "fc:0"], {"input:0": data})
    module = tf.Module()
    module.call = tf.function(network, input_signature=[tf.TensorSpec([None, 9, 9, 8], tf.float32)])
    tf.saved_model.save(module, str(folder / "saved"), signatures=module.call)
    return folder, data, expected, cut


@pytest.mark.parametrize("kind", ["frozen.pb", "saved"])
def test_layers_are_found_and_compressed(tmp_path, models, kind):
    folder, data, expected, _ = models
    report = convert(Options(str(folder / kind), str(tmp_path / "out"), framework=3, sparsity=1))
    assert [layer.compressed_operator for layer in report.layers] == [
        *("Conv2DCompress", "MatMulV2Compress", "MatMulV2Compress")
    ]
    dense = convert(Options(str(folder / kind), str(tmp_path / "dense"), framework=3, sparsity=0))
    assert dense.file_bytes_after
    results = []
    for name in ("out", "dense"):
        running = session(tmp_path / f"{name}.onnx")
        results.append(running.run(None, {running.get_inputs()[0].name: data})[0])
    assert results[0].tobytes() == results[1].tobytes()
    np.testing.assert_allclose(results[0], expected, atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense.json", "dense.onnx", "out.json", "out.onnx"]


def test_shapes_and_outputs_of_a_frozen_graph(tmp_path, models):
    folder, data, _, cut = models
    options = {"input_shape": "input:2,9,9,8", "out_nodes": "fc:0"}
    convert(Options(str(folder / "frozen.pb"), str(tmp_path / "out"), framework=3, sparsity=1, **options))
    running = session(tmp_path / "out.onnx")
    assert running.get_inputs()[0].shape == [2, 9, 9, 8]
    np.testing.assert_allclose(running.run(None, {"input:0": data})[0], cut, atol=1e-4)
    with pytest.raises(ConversionError, match="--out_nodes: the graph has no 'fcx'"):
        convert(Options(str(folder / "frozen.pb"), str(tmp_path / "x"), framework=3, out_nodes="fcx:0"))


def test_not_a_graph(tmp_path):
    path = tmp_path / "m.pb"
    path.write_bytes(b"no graph")
    with pytest.raises(ConversionError, match="cannot be converted from TensorFlow"):
        inspect(str(path), framework=3)
    assert list(tmp_path.iterdir()) == [path]


def _frozen(path, function, shape):
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, shape, name="input")
        tf.identity(function(x), name="output")
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return graph


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (tf.math.lgamma, "Lgamma"),
        (lambda x: tf.quantization.fake_quant_with_min_max_vars_per_channel(x, [-1.0] * 12, [1.0] * 12), "FakeQuant"),
    ],
)
def test_operators_without_a_form_in_onnx_are_named(tmp_path, function, words):
    weight = keep_two_of_four(np.random.default_rng(0).standard_normal((16, 12)).astype(np.float32), 0)
    _frozen(tmp_path / "frozen.pb", lambda x: function(tf.matmul(x, tf.constant(weight))), [None, 16])
    with pytest.raises(ConversionError, match=words) as caught:
        convert(Options(str(tmp_path / "frozen.pb"), str(tmp_path / "out"), framework=3, sparsity=1))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["frozen.pb"]


def test_the_complementary_error_function_is_mapped(tmp_path):
    data = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    graph = _frozen(tmp_path / "frozen.pb", lambda x: 0.5 * x * tf.math.erfc(-x * 0.7071), [None, 16])
    with tf.compat.v1.Session(graph=graph) as running:
        expected = running.run("output:0", {"input:0": data})
    convert(Options(str(tmp_path / "frozen.pb"), str(tmp_path / "out"), framework=3, sparsity=0))
    found = session(tmp_path / "out.onnx")
    np.testing.assert_allclose(found.run(None, {found.get_inputs()[0].name: data})[0], expected, atol=1e-5)
