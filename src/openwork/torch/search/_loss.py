"""The loss that gradients are taken of: L1 to a label like the output, cross-entropy to class indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openwork.errors import ConfigError, ModelError, WeightsError
from openwork.torch.search._batches import Batch

__all__ = ["LossFunction", "compute_loss", "default_loss", "output_tensor"]

LossFunction = Callable[[Any, Any], Tensor]


def output_tensor(output: Any) -> Tensor:
    """The tensor that stands for a model's output: itself, its ``logits``, or the first of several.

    Raises:
        ModelError: there is none.
    """
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    raise ModelError(f"the model returns a {type(output).__name__} without a floating-point tensor")


def default_loss(output: Any, label: Any) -> Tensor:
    """Cross-entropy when `label` holds class indices, else mean absolute difference (as AMCT).

    Class indices are integers with the output's shape less the class axis (1, or the last as in language
    models).

    Raises:
        ConfigError: the label fits neither.
    """
    if isinstance(output, (tuple, list)) and isinstance(label, (tuple, list)) and len(output) == len(label):
        return torch.stack([default_loss(one, two) for one, two in zip(output, label, strict=True)]).sum()
    result = output_tensor(output)
    if not isinstance(label, Tensor):
        raise ConfigError(f"input_data: the label is a {type(label).__name__}; a tensor is needed")
    shape, wanted = tuple(label.shape), tuple(result.shape)
    if label.dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64) and shape != wanted:
        scores = None
        if len(wanted) > 1 and shape == wanted[:1] + wanted[2:]:
            scores = result
        elif len(wanted) > 1 and shape == wanted[:-1]:
            scores = result.movedim(-1, 1)
        elif len(wanted) > 1 and shape == (wanted[0], 1):
            scores, label = result, label[:, 0]
        if scores is not None:
            low, high, classes = int(label.min()), int(label.max()), scores.shape[1]
            if high >= classes or (low < 0 and low != -100):
                raise ConfigError(
                    f"input_data: labels are {low} to {high}; the output has {classes} classes, "
                    f"0 to {classes - 1} are allowed"
                )
            return F.cross_entropy(scores, label.long())
    if shape == wanted:
        return F.l1_loss(result, label.to(result.dtype))
    raise ConfigError(
        f"input_data: the label's shape {shape} ({label.dtype}) does not fit the output's shape {wanted}; "
        "class indices or a tensor like the output are needed, or another loss (set_loss_func)"
    )


def compute_loss(model: torch.nn.Module, batch: Batch, loss_function: LossFunction | None) -> Tensor:
    """Run the model on a batch and reduce the loss to one number.

    Args:
        model: the model.
        batch: the batch.
        loss_function: called with the model's output and the label; None: `default_loss`, or the model's own
            ``loss`` when the batch brings no label of its own.

    Raises:
        ModelError: the forward fails.
        ConfigError: the loss cannot be computed from output and label, or is NaN or infinite.
        WeightsError: it is so because a weight is; the parameter is named.
    """
    try:
        output = model(*batch.inputs.args, **batch.inputs.kwargs)
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise ModelError(f"the forward of {type(model).__name__} fails on input_data: {words}") from error
    own = getattr(output, "loss", None)
    if loss_function is None and isinstance(own, Tensor):
        loss = own
    else:
        function = loss_function or default_loss
        try:
            loss = function(output, batch.label)
        except ConfigError:
            raise
        except Exception as error:
            words = " ".join(str(error).split())[:300]
            raise ConfigError(f"the loss cannot be computed from the model's output and the label: {words}") from error
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        raise ConfigError(f"the loss is a {type(loss).__name__}; a floating-point tensor is needed")
    loss = loss.sum() if loss.ndim else loss
    if not torch.isfinite(loss):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise WeightsError(f"{name} holds NaN or infinite values, and so the loss is {loss.item()}")
        raise ConfigError(f"the loss on input_data is {loss.item()}; it must be finite")
    return loss
