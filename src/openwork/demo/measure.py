"""Running the two ONNX files side by side in onnxruntime."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from openwork.demo.console import progress

__all__ = ["Runner", "latencies"]

_WARM_UP = 20


class Runner:
    """An ONNX file in onnxruntime, on one thread of the CPU."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.name = self.session.get_inputs()[0].name

    def __call__(self, images: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        logits: npt.NDArray[np.float32] = self.session.run(None, {self.name: images})[0]
        return logits


def latencies(
    first: Runner, second: Runner, images: npt.NDArray[np.float32], rounds: int, step: str
) -> tuple[float, float, float]:
    """Time both in turn, so that what else the machine does meets both alike.

    Args:
        first, second: what is compared.
        images: one batch.
        rounds: how often each runs.
        step: what the progress bar says.

    Returns:
        Median seconds of the first, of the second, and the median of the ratios first / second of each round.
    """
    for _ in range(_WARM_UP):
        first(images)
        second(images)
    times: list[tuple[float, float]] = []
    with progress(step, rounds) as advance:
        for index in range(rounds):
            start = time.perf_counter()
            first(images)
            middle = time.perf_counter()
            second(images)
            times.append((middle - start, time.perf_counter() - middle))
            advance(index + 1)
    return (
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(a / b for a, b in times),
    )
