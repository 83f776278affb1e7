"""The whole flow on digits in both frameworks: train, remove half of the channels, retrain, save, accuracy of the file.

The same network, data, config and learning rates; each framework trains as its users do (PyTorch the smaller model,
TensorFlow under masks) and starts from its own random numbers. Accuracies are those of the saved files: ONNX and .pb.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import torch

import openwork.tensorflow as amct_tensorflow
import openwork.torch as amct_torch
from openwork.demo import training as torch_training
from openwork.demo.data import load_digits
from openwork.demo.digits import load_arrays
from openwork.demo.measure import Runner
from openwork.demo.network import ResNet20
from openwork.demo_tensorflow.network import resnet20
from openwork.demo_tensorflow.training import accuracy, train, training_step

CONFIG = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"


def with_torch(folder: Path, epochs: int, seed: int) -> tuple[float, float]:
    digits = load_digits()
    torch.manual_seed(seed)
    dense = ResNet20()
    torch_training.train(dense, digits, epochs, 0.1, "", seed)
    before = torch_training.accuracy(dense, digits)
    example = (digits.test_images[:2],)
    pruned = amct_torch.create_prune_retrain_model(dense, example, folder / "c.cfg", folder / "record.txt")
    torch_training.train(pruned, digits, epochs, 0.05, "", seed)
    axes = {"image": {0: "n"}, "logits": {0: "n"}}
    amct_torch.save_prune_retrain_model(pruned.eval(), folder / "torch", example, ["image"], ["logits"], axes)
    logits = Runner(folder / "torch_deploy_model.onnx")(digits.test_images.numpy())
    return before, accuracy(logits, digits.test_labels.numpy())


def with_tensorflow(folder: Path, epochs: int, seed: int) -> tuple[float, float]:
    v1 = tf.compat.v1
    digits = load_arrays()
    images = digits.test_images[..., None]
    names = ["logits"], folder / "record.txt", folder / "c.cfg"
    net = resnet20(training=True, seed=seed)
    step = training_step(net)
    with net.graph.as_default(), v1.Session() as session:
        session.run(v1.global_variables_initializer())
        train(session, net, step, digits, epochs, 0.1, "", seed)
        v1.train.Saver().save(session, str(folder / "dense"))
    net = resnet20(training=False)
    with net.graph.as_default(), v1.Session() as session:
        v1.train.Saver().restore(session, str(folder / "dense"))
        before = accuracy(session.run(net.logits, {net.image: images}), digits.test_labels)
    net = resnet20(training=True)
    with net.graph.as_default():
        own = v1.global_variables()
    amct_tensorflow.create_prune_retrain_model(net.graph, *names)
    step = training_step(net)
    with net.graph.as_default(), v1.Session() as session:
        session.run(v1.global_variables_initializer())
        v1.train.Saver(own).restore(session, str(folder / "dense"))
        train(session, net, step, digits, epochs, 0.05, "", seed)
        v1.train.Saver().save(session, str(folder / "masked"))
    net = resnet20(training=False)
    amct_tensorflow.create_prune_retrain_model(net.graph, *names)
    with net.graph.as_default(), v1.Session() as session:
        v1.train.Saver().restore(session, str(folder / "masked"))
        frozen = v1.graph_util.convert_variables_to_constants(session, net.graph.as_graph_def(), ["logits"])
    (folder / "masked.pb").write_bytes(frozen.SerializeToString())
    amct_tensorflow.save_prune_retrain_model(folder / "masked.pb", ["logits"], folder / "record.txt", folder / "small")
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(v1.GraphDef.FromString((folder / "small.pb").read_bytes()), name="")
        with v1.Session(graph=graph) as session:
            return before, accuracy(session.run("logits:0", {"image:0": images}), digits.test_labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.get_logger().setLevel("ERROR")
    for amct in (amct_torch, amct_tensorflow):
        amct.set_logging_level("error")
    found: dict[str, list[tuple[float, float]]] = {"PyTorch": [], "TensorFlow": []}
    for seed in range(options.seeds):
        for name, flow in (("PyTorch", with_torch), ("TensorFlow", with_tensorflow)):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "c.cfg").write_text(CONFIG)
                found[name].append(flow(Path(folder), options.epochs, seed))
            print(f"seed {seed}, {name}: {found[name][-1][0]:.4f} -> {found[name][-1][1]:.4f}", flush=True)
    for name, pairs in found.items():
        dense, pruned = np.array(pairs).T
        spread = statistics.stdev(pruned) if len(pruned) > 1 else 0.0
        print(f"{name:10} dense {dense.mean():.4f}, half of the channels {pruned.mean():.4f} +- {spread:.4f}")


if __name__ == "__main__":
    main()
