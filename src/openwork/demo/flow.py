"""The first half: train, prune with AMCT's flow, prove the cut right, retrain, and hand over to a fresh process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import openwork.torch as amct
from openwork.demo.data import load_digits
from openwork.demo.network import ResNet20
from openwork.demo.training import accuracy, train
from openwork.errors import ModelError
from openwork.files import write_bytes, write_text
from openwork.record import load_record
from openwork.torch.retrain.records import plan_from_record

__all__ = ["run_demo"]

TOLERANCE = 1e-4
_CONFIG = """\
# Remove half of the channels of every layer, and whatever depends on them.
prune_config {
  filter_pruner {
    balanced_l2_norm_filter_prune {
      prune_ratio: 0.5
      ascend_optimized: false
    }
  }
}
"""


def run_demo(folder: Path, epochs: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Do the whole job and leave every file of it in a folder.

    Args:
        folder: the only place that is written to; it exists.
        epochs: passes over the training images, before pruning and again after it.
        rounds: how often each file is timed, see `openwork.demo.fresh.restore_and_measure`.
        say: called with one line for each finished step.

    Returns:
        What `openwork.demo.fresh.restore_and_measure` found, and ``masked_equivalence``.

    Raises:
        ModelError: the pruned model does not mean what the masked one means, or the fresh process fails.
        FileError: the folder cannot be written.
    """
    started = time.perf_counter()
    digits = load_digits()
    example = digits.test_images[:1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense = ResNet20()
    train(dense, digits, epochs, 0.1, "training ResNet-20")
    before = accuracy(dense, digits)
    say(f"trained ResNet-20 for {epochs} epochs: accuracy {before:.3f} ({time.perf_counter() - started:.0f} s)")
    _save_weights(dense, folder / "dense.pth")

    write_text(folder / "prune.cfg", _CONFIG)
    amct.set_logging_level(print_level="warning")
    pruned = amct.create_prune_retrain_model(dense, (example,), folder / "prune.cfg", folder / "record.txt")
    say(f"pruned half of the channels: accuracy {accuracy(pruned, digits):.3f} before retraining")
    plan = plan_from_record(load_record(folder / "record.txt"), dense)
    error = amct.verify(dense, pruned, plan, digits.test_images[:64])
    if not error <= TOLERANCE:
        raise ModelError(f"masked equivalence is {error:.1e}; at most {TOLERANCE:.0e} is rounding")
    say(f"verified: differs from the masked original by {error:.1e} of the largest output")

    started = time.perf_counter()
    train(pruned, digits, epochs, 0.05, "retraining the pruned model")
    say(f"retrained: accuracy {accuracy(pruned, digits):.3f} ({time.perf_counter() - started:.0f} s)")
    _save_weights(pruned, folder / "pruned.pth")

    results = _in_fresh_process(folder, rounds)
    say(
        "restored from the record in a fresh process, exported to ONNX; onnxruntime differs from torch by "
        f"{results['pruned']['error']:.1e}"
    )
    results["masked_equivalence"] = error
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    return results


def _save_weights(model: nn.Module, path: Path) -> None:
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    write_bytes(path, stream.getvalue())


def _in_fresh_process(folder: Path, rounds: int) -> dict[str, Any]:
    # stderr is passed on, so that its progress bars show on the same terminal.
    command = [sys.executable, "-m", "openwork.demo.fresh", str(folder), str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ModelError(f"the fresh process that restores from {folder} failed with exit code {done.returncode}")
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results
