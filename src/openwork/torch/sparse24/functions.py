"""Autograd functions of masked layers.

Two ways to mask:

* in place (the mask never changes): pruned weights are zero in the parameter itself, and only the gradient
  has to be masked: `mask_gradient`, or the functions below with a clean weight;
* kept (the mask changes, or pruned weights are pulled to zero): the parameter keeps all its values and the
  masked weight exists only while a layer is computed. `MaskedConvolution` and `MaskedLinear` save the
  parameter and the mask, which exist anyway, and make the masked weight a second time on the way back, so no
  step holds two copies of the weights.

Where a large weight meets few rows the functions contract it piece by piece, see `products`.

The gradient of the kept way is the masked one, or with a decay that of SR-STE: the gradient with respect to
the masked weight reaches every weight, and a pruned weight w gets ``decay * w`` on top (Zhou et al. 2021,
"Learning N:M fine-grained structured sparse neural networks from scratch").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from openwork.torch.sparse24.products import (
    Rule,
    gather,
    is_small,
    masked,
    multiply_mask_,
    output_size,
    product,
    product_gradients,
    scatter,
)

__all__ = ["MaskWeight", "MaskedConvolution", "MaskedLinear", "convolves_few", "mask_gradient", "multiplies_few"]


def _weight_gradient(gradient: Tensor, weight: Tensor, mask: Tensor, decay: float | None) -> Tensor:
    """The gradient of the parameter from that of the masked weight; may reuse the memory of `gradient`."""
    gradient = gradient.to(weight.dtype)
    if torch.is_grad_enabled():
        # A gradient of this gradient was asked for: every step has to be recorded.
        return gradient * mask if decay is None else gradient + decay * (weight * ~mask)
    if decay is None:
        return multiply_mask_(gradient, mask) if gradient.is_contiguous() else gradient * mask
    pruned = mask.logical_not()
    if torch.compiler.is_compiling():
        # inductor loses the factor of an addition that it puts into a matrix product.
        return gradient + decay * masked(weight, pruned)
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


def convolves_few(x: Tensor, weight: Tensor, mask: Tensor, settings: tuple[Any, ...]) -> bool:
    """Whether `MaskedConvolution` goes through a weight piece by piece for images `x`: [B, C, H, W]."""
    transposed, groups = settings[3], settings[5]
    if transposed or groups != 1 or x.dim() != 4 or x.shape[1] != weight.shape[1]:
        return False
    height, width = output_size(x, tuple(weight.shape[2:]), settings)
    return height > 0 and width > 0 and is_small(x.shape[0] * height * width, x, weight, mask)


def multiplies_few(x: Tensor, weight: Tensor, mask: Tensor) -> bool:
    """Whether `MaskedLinear` goes through a weight piece by piece for inputs `x`: [.., K]."""
    if not x.dim() or x.shape[-1] != weight.shape[1]:
        return False
    return is_small(x.numel() // weight.shape[1], x, weight, mask)


class MaskedConvolution(Function):
    """Convolution (also transposed) of `x` with ``weight * mask``.

    Args:
        x: [B, C, H, W].
        weight, mask, bias: of the layer.
        settings: those of ``torch.ops.aten.convolution``: stride, padding, dilation, transposed, output padding,
            groups.
        decay: None, or the decay of SR-STE.
        clean: the weight is zero already where the mask says so.
        rule: None, or how to choose the mask, which is written before it is used.
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
        clean: bool = False,
        rule: Rule | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mask)
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        ctx.settings = settings
        ctx.decay = decay
        ctx.clean = clean
        if not convolves_few(x, weight, mask, settings):
            return torch.ops.aten.convolution(x, masked(weight, mask, rule).to(x.dtype), bias, *settings)
        kernel = tuple(weight.shape[2:])
        size = output_size(x, kernel, settings)
        result = product(gather(x, kernel, settings), weight, None if clean else mask, rule)
        if bias is not None:
            result += bias
        # Images in the order in memory in which they came, as torch's convolution gives them.
        return result.view(len(x), *size, -1).permute(0, 3, 1, 2).contiguous(memory_format=_order_of(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mask = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        needs_bias = needs_bias and ctx.bias_sizes is not None
        if not torch.is_grad_enabled() and convolves_few(x, weight, mask, ctx.settings):
            kernel = tuple(weight.shape[2:])
            slopes = gradient.permute(0, 2, 3, 1).reshape(-1, weight.shape[0])
            to_rows, to_weight = product_gradients(
                slopes,
                gather(x, kernel, ctx.settings),
                weight,
                mask,
                ctx.clean,
                ctx.decay,
                needs_x,
                needs_weight,
            )
            to_x = None if to_rows is None else scatter(to_rows, x.shape, kernel, ctx.settings)
            to_weight = None if to_weight is None else to_weight.view(weight.shape)
            return to_x, to_weight, None, slopes.sum(0) if needs_bias else None, None, None, None, None
        to_x = to_weight = to_bias = None
        backward = torch.ops.aten.convolution_backward
        rest = ctx.bias_sizes, *ctx.settings
        if needs_weight or needs_bias:
            # The weight only tells its shape here. One after the other: no two temporary weights at a time.
            wanted = [False, needs_weight, needs_bias]
            _, to_weight, to_bias = backward(gradient, x, weight.detach().to(x.dtype), *rest, wanted)
            if needs_weight:
                to_weight = _weight_gradient(to_weight, weight, mask, ctx.decay)
        if needs_x:
            effective = weight * mask if torch.is_grad_enabled() else masked(weight, mask)
            to_x, _, _ = backward(gradient, x, effective.to(x.dtype), *rest, [True, False, False])
        return to_x, to_weight, None, to_bias, None, None, None, None


def _order_of(x: Tensor) -> torch.memory_format:
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


class MaskedLinear(Function):
    """``x @ (weight * mask).T + bias``; the arguments are those of `MaskedConvolution`, `x` is [.., K]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        mask: Tensor,
        bias: Tensor | None,
        decay: float | None,
        clean: bool = False,
        rule: Rule | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mask)
        ctx.decay = decay
        ctx.clean = clean
        if not multiplies_few(x, weight, mask):
            return torch.nn.functional.linear(x, masked(weight, mask, rule).to(x.dtype), bias)
        result = product(x.reshape(-1, x.shape[-1]), weight, None if clean else mask, rule)
        if bias is not None:
            result += bias
        return result.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mask = ctx.saved_tensors
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        to_x = to_weight = to_bias = None
        rows = gradient.reshape(-1, gradient.shape[-1])
        if needs_bias:
            to_bias = rows.sum(0)
        if not torch.is_grad_enabled() and multiplies_few(x, weight, mask):
            inputs = x.reshape(-1, x.shape[-1])
            to_x, to_weight = product_gradients(rows, inputs, weight, mask, ctx.clean, ctx.decay, needs_x, needs_weight)
            return None if to_x is None else to_x.view(x.shape), to_weight, None, to_bias, None, None, None
        if needs_weight:
            to_weight = _weight_gradient(rows.t() @ x.reshape(-1, x.shape[-1]), weight, mask, ctx.decay)
        if needs_x:
            effective = weight * mask if torch.is_grad_enabled() else masked(weight, mask)
            to_x = gradient @ effective.to(x.dtype)
        return to_x, to_weight, None, to_bias, None, None, None
