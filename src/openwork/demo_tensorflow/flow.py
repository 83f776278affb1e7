"""Train, search, prune, retrain, save, convert to ONNX, run; every step as a user of AMCT's functions writes it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import openwork.tensorflow as amct
from openwork.demo.digits import DigitArrays, load_arrays
from openwork.demo.measure import Runner, latencies
from openwork.demo_tensorflow.network import ResNet20Graph, resnet20
from openwork.demo_tensorflow.training import accuracy, train, training_step
from openwork.errors import ModelError
from openwork.files import write_bytes, write_text

__all__ = ["COMPRESSION", "run_demo"]

TOLERANCE = 1e-4
COMPRESSION = 2.0
_SAMPLES = 256


def run_demo(folder: Path, epochs: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Do the whole job and leave every file of it in a folder.

    Args:
        folder: the only place that is written to; it exists.
        epochs: passes over the training images, before pruning and again after it.
        rounds: how often each ONNX file is timed on one image; on 64 a quarter as often.
        say: called with one line for each finished step.

    Returns:
        For ``dense`` and ``pruned``: accuracy, parameters, MACs of one image, bytes, latency in seconds of one image
        and of a batch of 64, error of onnxruntime against TensorFlow; ``ratio`` of the latencies;
        ``masked_equivalence``.

    Raises:
        ModelError: the saved graph does not mean what the masked one means, or the conversion fails.
        FileError: the folder cannot be written.
    """
    digits = load_arrays()
    amct.set_logging_level(print_level="warning")
    tf.get_logger().setLevel("ERROR")  # freezing is deprecated in TensorFlow
    started = time.perf_counter()
    found = _train_dense(folder, digits, epochs)
    say(f"trained ResNet-20 for {epochs} epochs: accuracy {found:.3f} ({time.perf_counter() - started:.0f} s)")
    started = time.perf_counter()
    _search(folder, digits)
    seconds = time.perf_counter() - started
    say(f"searched: which channels to remove for {COMPRESSION:g} times fewer operations ({seconds:.0f} s)")
    started = time.perf_counter()
    _retrain(folder, digits, epochs)
    masked = _freeze_masked(folder, digits)
    say(f"retrained under masks: accuracy {accuracy(masked, digits.test_labels):.3f} "
        f"({time.perf_counter() - started:.0f} s)")  # fmt: skip
    amct.save_prune_retrain_model(folder / "masked.pb", ["logits"], folder / "record.txt", folder / "pruned")
    results: dict[str, Any] = {"ratio": {}}
    runners, saved = {}, {}
    for name in ("dense", "pruned"):
        saved[name] = _run(folder / f"{name}.pb", digits.test_images)
        _convert(folder / f"{name}.pb", folder / name)
        runners[name] = Runner(folder / f"{name}.onnx")
        results[name] = _described(folder / name, runners[name], digits, saved[name])
    error = float(np.abs(saved["pruned"] - masked).max() / np.abs(masked).max())
    if not error <= TOLERANCE:
        raise ModelError(f"masked equivalence is {error:.1e}; at most {TOLERANCE:.0e} is rounding")
    say(f"cut, and verified: differs from the masked graph by {error:.1e} of the largest output")
    say(f"converted to ONNX; onnxruntime differs from TensorFlow by {results['pruned']['error']:.1e}")
    images = digits.test_images[..., None]
    for batch, times in ((1, rounds), (64, max(1, rounds // 4))):
        first, second, ratio = latencies(
            runners["dense"], runners["pruned"], images[:batch], times, f"timing batches of {batch}"
        )
        results["dense"][f"latency_{batch}"], results["pruned"][f"latency_{batch}"] = first, second
        results["ratio"][f"latency_{batch}"] = ratio
    results["masked_equivalence"] = error
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    return results


def _train_dense(folder: Path, digits: DigitArrays, epochs: int) -> float:
    v1 = tf.compat.v1
    net = resnet20(training=True)
    step = training_step(net)
    with net.graph.as_default(), v1.Session() as session:
        session.run(v1.global_variables_initializer())
        train(session, net, step, digits, epochs, 0.1, "training ResNet-20")
        v1.train.Saver().save(session, str(folder / "dense.ckpt"), write_meta_graph=False)
    net = resnet20(training=False)
    with net.graph.as_default(), v1.Session() as session:
        v1.train.Saver().restore(session, str(folder / "dense.ckpt"))
        return accuracy(_freeze(net, session, folder / "dense.pb", digits), digits.test_labels)


def _search(folder: Path, digits: DigitArrays) -> None:
    v1 = tf.compat.v1
    write_text(folder / "search.cfg", f"compress_ratio: {COMPRESSION}\nascend_optimized: true\n")
    net = resnet20(training=True)
    training_step(net)  # the search reads the gradients that the optimizer gets
    feed = {"image:0": digits.train_images[:_SAMPLES][..., None], "label:0": digits.train_labels[:_SAMPLES]}
    with net.graph.as_default(), v1.Session() as session:
        v1.train.Saver().restore(session, str(folder / "dense.ckpt"))
        amct.auto_channel_prune_search(net.graph, ["logits"], folder / "search.cfg", [feed], folder / "prune.cfg")


def _retrain(folder: Path, digits: DigitArrays, epochs: int) -> None:
    v1 = tf.compat.v1
    net = resnet20(training=True)
    with net.graph.as_default():
        trained = v1.global_variables()
    amct.create_prune_retrain_model(net.graph, ["logits"], folder / "record.txt", folder / "prune.cfg")
    step = training_step(net)
    with net.graph.as_default(), v1.Session() as session:
        session.run(v1.global_variables_initializer())
        v1.train.Saver(trained).restore(session, str(folder / "dense.ckpt"))
        train(session, net, step, digits, epochs, 0.05, "retraining under masks")
        v1.train.Saver().save(session, str(folder / "masked.ckpt"), write_meta_graph=False)


def _freeze_masked(folder: Path, digits: DigitArrays) -> np.ndarray:
    v1 = tf.compat.v1
    net = resnet20(training=False)
    amct.create_prune_retrain_model(net.graph, ["logits"], folder / "record.txt", folder / "prune.cfg")
    with net.graph.as_default(), v1.Session() as session:
        v1.train.Saver().restore(session, str(folder / "masked.ckpt"))
        return _freeze(net, session, folder / "masked.pb", digits)


def _freeze(net: ResNet20Graph, session: tf.compat.v1.Session, path: Path, digits: DigitArrays) -> np.ndarray:
    """Write the frozen graph; its logits of the test images."""
    frozen = tf.compat.v1.graph_util.convert_variables_to_constants(session, net.graph.as_graph_def(), ["logits"])
    write_bytes(path, frozen.SerializeToString())
    return np.asarray(session.run(net.logits, {net.image: digits.test_images[..., None]}))


def _run(path: Path, images: np.ndarray) -> np.ndarray:
    graph_def = tf.compat.v1.GraphDef.FromString(path.read_bytes())
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        with tf.compat.v1.Session(graph=graph) as session:
            return np.asarray(session.run("logits:0", {"image:0": images[..., None]}))


def _convert(path: Path, output: Path) -> None:
    """As on the command line."""
    arguments = ["--model", str(path), "--framework", "3", "--out_nodes", "logits:0", "--output", str(output)]
    command = [sys.executable, "-m", "openwork", "convert", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError(f"openwork convert of {path} failed: {' '.join(done.stderr.split())[-500:]}")


def _described(path: Path, runner: Runner, digits: DigitArrays, expected: np.ndarray) -> dict[str, Any]:
    logits = runner(digits.test_images[..., None])
    graph_def = tf.compat.v1.GraphDef.FromString(path.with_suffix(".pb").read_bytes())
    analysis = amct.analyze_graph(graph_def, ["logits"])
    return {
        "accuracy": accuracy(logits, digits.test_labels),
        "parameters": analysis.params,
        "macs": analysis.macs,
        "bytes": path.with_suffix(".onnx").stat().st_size,
        "error": float(np.abs(logits - expected).max() / np.abs(expected).max()),
    }
