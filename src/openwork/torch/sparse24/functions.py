"""Autograd functions of masked layers.

Two ways to mask:

* in place (the mask never changes): pruned weights are zero in the parameter itself, and only the gradient
  has to be masked: `mask_gradient`;
* kept (the mask changes, or pruned weights are pulled to zero): the parameter keeps all its values and the
  masked weight exists only while a layer is computed. `MaskedConvolution` and `MaskedLinear` save the
  parameter and the mask, which exist anyway, and make the masked weight a second time on the way back, so no
  step holds two copies of the weights.

The gradient of the kept way is the masked one, or with a decay that of SR-STE: the gradient with respect to
the masked weight reaches every weight, and a pruned weight w gets ``decay * w`` on top (Zhou et al. 2021,
"Learning N:M fine-grained structured sparse neural networks from scratch").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

__all__ = ["MaskWeight", "MaskedConvolution", "MaskedLinear", "mask_gradient", "masked", "multiply_mask_"]

_NUMPY_KINDS = (torch.float32, torch.float64)


def _for_numpy(*tensors: Tensor) -> bool:
    """Whether NumPy may work on these: its mixed product of floats and booleans is many times torch's speed.

    Only plain tensors in memory qualify: no fake tensor, no tracing.
    """
    return not torch.compiler.is_compiling() and all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not torch._C._is_tracing()
        for tensor in tensors
    )


def multiply_mask_(tensor: Tensor, mask: Tensor) -> Tensor:
    """Multiply a float tensor by a boolean mask in place; no gradient is recorded."""
    if tensor.dtype in _NUMPY_KINDS and _for_numpy(tensor, mask):
        array = tensor.detach().numpy()
        np.multiply(array, mask.numpy(), out=array)
        return tensor
    return tensor.detach().mul_(mask)


def masked(weight: Tensor, mask: Tensor) -> Tensor:
    """weight * mask as a new tensor; no gradient is recorded on the fast path."""
    if weight.dtype in _NUMPY_KINDS and _for_numpy(weight, mask):
        result = torch.empty_like(weight, requires_grad=False)
        np.multiply(weight.detach().numpy(), mask.numpy(), out=result.numpy())
        return result
    return weight * mask


def _weight_gradient(gradient: Tensor, weight: Tensor, mask: Tensor, decay: float | None) -> Tensor:
    """The gradient of the parameter from that of the masked weight; may reuse the memory of `gradient`."""
    gradient = gradient.to(weight.dtype)
    if torch.is_grad_enabled():
        # A gradient of this gradient was asked for: every step has to be recorded.
        return gradient * mask if decay is None else gradient + decay * (weight * ~mask)
    if decay is None:
        return multiply_mask_(gradient, mask) if gradient.is_contiguous() else gradient * mask
    pruned = mask.logical_not()
    return gradient.add_(masked(weight, pruned), alpha=decay)


def mask_gradient(weight: Tensor, mask: Tensor) -> Tensor:
    """The weight as it is, for one use; its gradient is zero where the mask is False."""
    use = weight.view_as(weight)
    if use.requires_grad:

        def keep(gradient: Tensor) -> Tensor:
            if torch.is_grad_enabled() or not gradient.is_contiguous():
                return gradient * mask
            # The contraction made this gradient for the one use of this view: nobody else holds it.
            return multiply_mask_(gradient, mask)

        use.register_hook(keep)
    return use


class MaskWeight(Function):
    """weight * mask, for layers with a forward of their own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor, decay: float | None) -> Tensor:
        ctx.save_for_backward(weight, mask)
        ctx.decay = decay
        return masked(weight, mask)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight, mask = ctx.saved_tensors
        decay = ctx.decay
        if decay is None:
            return gradient * mask, None, None
        return gradient + decay * (weight * ~mask), None, None


class MaskedConvolution(Function):
    """Convolution (also transposed) of `x` with ``weight * mask``.

    The settings are those of ``torch.ops.aten.convolution``: stride, padding, dilation, transposed, output
    padding, groups.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        mask: Tensor,
        bias: Tensor | None,
        settings: tuple[Any, ...],
        decay: float | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mask)
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        ctx.settings = settings
        ctx.decay = decay
        return torch.ops.aten.convolution(x, masked(weight, mask).to(x.dtype), bias, *settings)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mask = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        effective = weight * mask if torch.is_grad_enabled() else masked(weight, mask)
        to_x, to_weight, to_bias = torch.ops.aten.convolution_backward(
            gradient,
            x,
            effective.to(x.dtype),
            ctx.bias_sizes,
            *ctx.settings,
            [needs_x, needs_weight, needs_bias and ctx.bias_sizes is not None],
        )
        if needs_weight:
            to_weight = _weight_gradient(to_weight, weight, mask, ctx.decay)
        return to_x, to_weight, None, to_bias, None, None


class MaskedLinear(Function):
    """``x @ (weight * mask).T + bias``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mask: Tensor, bias: Tensor | None, decay: float | None) -> Tensor:
        ctx.save_for_backward(x, weight, mask)
        ctx.decay = decay
        return torch.nn.functional.linear(x, masked(weight, mask).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mask = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        to_x = to_weight = to_bias = None
        rows = gradient.reshape(-1, gradient.shape[-1])
        if needs_x:
            effective = weight * mask if torch.is_grad_enabled() else masked(weight, mask)
            to_x = gradient @ effective.to(x.dtype)
        if needs_weight:
            product = rows.t() @ x.reshape(-1, x.shape[-1])
            to_weight = _weight_gradient(product, weight, mask, ctx.decay)
        if needs_bias:
            to_bias = rows.sum(0)
        return to_x, to_weight, None, to_bias, None
