"""What the operators that openwork puts into a graph cost a training step of TensorFlow.

ResNet-20 of the demo, batches of 64 images of 16 x 16; steps of all graphs in turn, so that what else the machine does
meets them alike; the ratio to the plain graph is the median over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import openwork.tensorflow as amct
from openwork.demo_tensorflow.network import resnet20
from openwork.demo_tensorflow.training import training_step

CHANNELS = "filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } }"
PATTERN = "n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: M4N2 update_freq: %d } }"
CONFIGS = {
    "plain": "",
    "channel masks": CHANNELS,
    "2:4, update_freq 0": PATTERN % 0,
    "2:4, update_freq 10": PATTERN % 10,
    "2:4, update_freq 1": PATTERN % 1,
}


class Step:
    """One graph and its session."""

    def __init__(self, config: str, folder: Path, late: bool) -> None:
        self.net = resnet20(training=True)
        step = training_step(self.net) if late else None
        if config:
            (folder / "c.cfg").write_text(f"prune_config {{ {config} }}")
            amct.create_prune_retrain_model(self.net.graph, ["logits"], folder / "record.txt", folder / "c.cfg")
        self.step = step or training_step(self.net)
        with self.net.graph.as_default():
            self.session = tf.compat.v1.Session()
            self.session.run(tf.compat.v1.global_variables_initializer())

    def __call__(self, images: Any, labels: Any) -> float:
        feed = {self.net.image: images, self.net.label: labels, self.step.rate: 0.01}
        start = time.perf_counter()
        self.session.run(self.step.operator, feed)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--late", action="store_true", help="create after the optimizer was built")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    amct.set_logging_level("error")
    random = np.random.default_rng(0)
    images = random.standard_normal((options.batch, 16, 16, 1), dtype=np.float32)
    labels = random.integers(0, 10, options.batch)
    with tempfile.TemporaryDirectory() as folder:
        steps = {name: Step(config, Path(folder), options.late) for name, config in CONFIGS.items()}
    for step in steps.values():
        for _ in range(5):
            step(images, labels)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            times[name].append(step(images, labels))
    print(f"{'graph':22} {'ms':>7} {'ratio':>6}")
    for name, found in times.items():
        ratio = statistics.median(a / b for a, b in zip(found, times["plain"], strict=True))
        print(f"{name:22} {statistics.median(found) * 1e3:7.1f} {ratio:6.3f}")


if __name__ == "__main__":
    main()
