"""The second half, ``python -m openwork.demo.fresh FOLDER``: a process that has never seen the pruned model.

It knows the class of the network, the record and two weights files. It restores the pruned model, exports both
models, and runs the files in onnxruntime. Results go to stdout as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import openwork.torch as amct
from openwork.demo.data import Digits, load_digits
from openwork.demo.measure import Runner, latencies
from openwork.demo.network import ResNet20

__all__ = ["restore_and_measure"]

_NAMES = {"input_names": ["image"], "output_names": ["logits"], "dynamic_axes": {"image": {0: "n"}, "logits": {0: "n"}}}


def restore_and_measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Restore, export, run.

    Args:
        folder: where the first half left ``dense.pth``, ``pruned.pth``, ``record.txt`` and ``prune.cfg``.
        rounds: how often each file is timed on one image; on 64 a quarter as often.

    Returns:
        For ``dense`` and ``pruned``: accuracy, parameters, MACs of one image, bytes, latency in seconds of one
        image and of a batch of 64; ``ratio`` of the latencies; ``error``: largest difference between onnxruntime
        and torch over the largest output.
    """
    digits = load_digits()
    example = digits.test_images[:1]
    dense = ResNet20()
    dense.load_state_dict(torch.load(folder / "dense.pth", map_location="cpu", weights_only=True))
    pruned = amct.restore_prune_retrain_model(
        ResNet20(), (example,), folder / "record.txt", folder / "prune.cfg", folder / "pruned.pth"
    )
    results: dict[str, Any] = {"ratio": {}}
    runners: dict[str, Runner] = {}
    for name, model in (("dense", dense), ("pruned", pruned)):
        model.eval()
        # Two images, for an exporter may take a length of 1 for a constant.
        amct.save_prune_retrain_model(model, folder / name, (digits.test_images[:2],), **_NAMES)  # type: ignore[arg-type]
        runners[name] = Runner(folder / f"{name}_deploy_model.onnx")
        results[name] = _described(model, runners[name], folder / f"{name}_deploy_model.onnx", digits)
    images = digits.test_images.numpy()
    for batch, times in ((1, rounds), (64, max(1, rounds // 4))):
        first, second, ratio = latencies(
            runners["dense"], runners["pruned"], images[:batch], times, f"timing batches of {batch}"
        )
        results["dense"][f"latency_{batch}"], results["pruned"][f"latency_{batch}"] = first, second
        results["ratio"][f"latency_{batch}"] = ratio
    return results


def _described(model: nn.Module, runner: Runner, path: Path, digits: Digits) -> dict[str, Any]:
    logits = runner(digits.test_images.numpy())
    with torch.no_grad():
        expected = model(digits.test_images).numpy()
    analysis = amct.analyze(model, digits.test_images[:1])
    return {
        "accuracy": float((logits.argmax(1) == digits.test_labels.numpy()).mean()),
        "parameters": analysis.params,
        "macs": analysis.macs,
        "bytes": path.stat().st_size,
        "error": float(np.abs(logits - expected).max() / np.abs(expected).max()),
    }


if __name__ == "__main__":
    amct.set_logging_level(print_level="warning")
    print(json.dumps(restore_and_measure(Path(sys.argv[1]), int(sys.argv[2]))))
