"""What the loss would lose with each unit, from gradients.

Put a gate z = 1 on a unit's channel where it is read. Then dloss/dz = sum of activation * dloss/dactivation, and
to first order the unit is worth |dloss/dz|, to second order (Fisher) half its square, sample by sample. One
backward pass of the whole batch gives the gates of every sample at once, because in eval mode the samples do not
meet. Where a channel is read by something that is no module with one input (a fused attention's packed weight,
say), the sum of weight * gradient over the reading weights is the same number summed over the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from openwork.errors import WeightsError

__all__ = ["eval_mode", "gradients", "learning"]


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; every module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def learning(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """All floating-point parameters by name, asking for gradients inside, as they were afterwards."""
    named = model.named_parameters(remove_duplicate=False)
    parameters: dict[str, Tensor] = {name: tensor for name, tensor in named if tensor.is_floating_point()}
    flags = {name: parameter.requires_grad for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield parameters
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(flags[name])


def gradients(loss: Tensor, parameters: dict[str, Tensor], wanted: Sequence[str]) -> dict[str, Tensor]:
    """Gradients by name, without touching ``.grad``; parameters that the loss does not depend on are absent.

    Raises:
        WeightsError: a gradient is NaN or infinite; the parameter is named.
    """
    names = [name for name in dict.fromkeys(wanted) if name in parameters]
    found = torch.autograd.grad(loss, [parameters[name] for name in names], allow_unused=True)
    result = {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}
    for name, gradient in result.items():
        if not torch.isfinite(gradient.sum()) and not torch.isfinite(gradient).all():
            raise WeightsError(f"gradient of {name} is NaN or infinite on input_data")
    return result
