"""TensorFlow frozen graphs and SavedModels to ONNX, through tf2onnx in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from openwork.convert.shapes import parse_input_shape
from openwork.errors import ConversionError, FileError

__all__ = ["to_onnx"]

_OPSET = 18  # the newest that tf2onnx writes


def to_onnx(model: str, output: Path, input_shape: str | None, out_nodes: str | None) -> None:
    """Write `model` as ONNX to `output`.

    Args:
        model: a frozen graph (.pb), or the folder of a SavedModel.
        output: the .onnx file to write.
        input_shape: ATC's text; sizes of a frozen graph's inputs.
        out_nodes: ATC's text; outputs of a frozen graph.

    Raises:
        FileError: there is no such model.
        ConversionError: tensorflow or tf2onnx is missing, or tf2onnx fails.
    """
    source = Path(model)
    if not os.path.exists(source):
        raise FileError(f"--model {source} does not exist")
    for package in ("tensorflow", "tf2onnx"):
        if importlib.util.find_spec(package) is None:
            raise ConversionError(
                f"--framework 3 needs {package}, which is not installed; install it with: "
                'pip install "openwork[tensorflow]"'
            )
    arguments = [sys.executable, "-m", "openwork.convert._tf2onnx", str(source), str(output), str(_OPSET)]
    arguments.append(";".join(f"{n}:{','.join(map(str, s))}" for n, s in _shapes(input_shape).items()))
    arguments.append(out_nodes or "")
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode or not os.path.isfile(output):
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit code {done.returncode}"
        raise ConversionError(f"--model {source}: cannot be converted from TensorFlow: {reason[:300]}")


def _shapes(input_shape: str | None) -> dict[str, list[int]]:
    return {} if input_shape is None else parse_input_shape(input_shape)
