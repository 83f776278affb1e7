"""What onnxruntime, where it is installed, makes of a written file, beside what the model itself computes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from openwork.torch.structure import one_line
from openwork.torch.watch import tensors_in

__all__ = ["FLOAT_TOLERANCE", "QUANTISED_TOLERANCE", "warn_if_different"]

_LOG = logging.getLogger("openwork")
FLOAT_TOLERANCE = 1e-2
# Rounding at a boundary moves values by whole steps, and later layers carry that on.
QUANTISED_TOLERANCE = 0.2
_LARGEST = 1 << 30  # bytes; a second copy of more would be a surprise


def warn_if_different(file: Path, inputs: tuple[Any, ...], expected: Any, tolerance: float, shown: Path) -> None:
    """Log a warning where a file computes something else than the model, or onnxruntime cannot load it.

    Nothing is said where there is nothing to compare: without onnxruntime, for inputs that are no plain tensors, for
    results that the file has in another number, or for files above 1 GB.

    Args:
        file: an ONNX file.
        inputs: positional inputs of forward.
        expected: what forward returned for them.
        tolerance: largest difference, as a share of the largest output, that is passed over.
        shown: name of the file, for the message.
    """
    if sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*")) > _LARGEST:
        return
    try:
        import onnxruntime
    except ImportError:
        return
    wanted = [tensor.detach().cpu() for tensor in tensors_in(expected)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        if len(names) != len(inputs) or not all(isinstance(value, torch.Tensor) for value in inputs):
            return
        found = session.run(None, {name: value.detach().cpu().numpy() for name, value in zip(names, inputs)})
    except Exception as error:  # onnxruntime's own errors have no common base
        _LOG.warning("%s: onnxruntime cannot run it: %s", shown, one_line(error))
        return
    if len(found) != len(wanted):
        return
    for given, made in zip(wanted, found):
        result = torch.as_tensor(made)
        if given.shape != result.shape:
            shapes = list(result.shape), list(given.shape)
            _LOG.warning("%s: in onnxruntime it gives the shape %s, the model gives %s", shown, *shapes)
            return
        if not given.is_floating_point() or not given.numel() or not bool(torch.isfinite(given).all()):
            continue
        largest = float(given.double().abs().max())
        difference = float((result.double() - given.double()).abs().max())
        if not difference <= tolerance * max(largest, 1e-30):
            _LOG.warning(
                "%s: in onnxruntime its output differs from the model's by %.3g, where the largest output is %.3g: the "
                "export changed what the model computes, or the model is random",
                shown,
                difference,
                largest,
            )
            return
