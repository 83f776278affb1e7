"""Masking weights, and products of a few rows with a large masked weight, in pieces that stay in the cache.

Rows are samples of a linear layer, or positions of images that a convolution gathers (im2col). When there are few,
each weight is used a few times and moving it through memory is what costs. Then a convolution is taken as a matrix
product, piece by piece of the matrix: a piece is masked just before it is used, so that no masked copy of the
weight is ever written, and its gradient is masked as soon as it is made.

Compiled loops do the masking where they are installed (`openwork.sparsity.compiled`). With them a mask that is due is
chosen on the way, piece by piece, which saves one reading of the weight. Else NumPy does it: its mixed product of
floats and booleans is many times torch's speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from openwork.sparsity import compiled
from openwork.sparsity.masks import compiled_chooser

__all__ = [
    "Rule",
    "can_choose",
    "for_numpy",
    "gather",
    "is_small",
    "masked",
    "multiply_mask_",
    "output_size",
    "product",
    "product_gradients",
    "scatter",
]

# N and M of a mask along axis 1.
Rule = tuple[int, int]
_KINDS = (torch.float32, torch.float64)
# Weights per piece: a NumPy call costs little per weight, and a piece, its mask and a scratch fit into a 2 MB cache.
_PIECE = 131072
# Rows up to which the product waits for the weights; with more the convolutions of oneDNN are faster.
_FEW = 32


def for_numpy(*tensors: Tensor) -> bool:
    """Whether NumPy may work on these: only plain tensors in memory qualify, and no tracing or torch.func."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        for tensor in tensors
    )


def multiply_mask_(tensor: Tensor, mask: Tensor) -> Tensor:
    """Multiply a float tensor by a boolean mask in place; no gradient is recorded."""
    if tensor.dtype in _KINDS and for_numpy(tensor, mask):
        array, stay = tensor.detach().numpy().reshape(-1), mask.numpy().reshape(-1)
        kernels = compiled.kernels() if array.size >= compiled.LEAST else None
        if kernels is not None:
            kernels.multiply_in_place(array, stay)
        else:
            np.multiply(array, stay, out=array)
        return tensor
    return tensor.detach().mul_(mask)


def can_choose(weight: Tensor) -> bool:
    """Whether a mask along axis 1 can be left to `masked` or `product` to choose."""
    return (
        weight.dtype in _KINDS
        and weight.numel() >= compiled.LEAST
        and for_numpy(weight)
        and compiled.kernels() is not None
    )


def masked(weight: Tensor, mask: Tensor, rule: Rule | None = None) -> Tensor:
    """weight * mask as a new tensor; no gradient is recorded on the fast path.

    Args:
        weight: any shape.
        mask: bool, of the shape of the weight.
        rule: None, or how to choose the mask, which is written; `can_choose` must hold.
    """
    if weight.dtype in _KINDS and for_numpy(weight, mask):
        result = torch.empty_like(weight, requires_grad=False)
        values, stay, out = (tensor.detach().numpy().reshape(-1) for tensor in (weight, mask, result))
        mask_into = _masking(weight, rule)
        step = _PIECE if rule is None else _rows(weight) * weight[0].numel()
        for start in range(0, values.size, step):
            mask_into(values[start : start + step], stay[start : start + step], out[start : start + step])
        return result
    return weight * mask


def _masking(weight: Tensor, rule: Rule | None) -> Callable[[np.ndarray, np.ndarray, np.ndarray], None]:
    """A function of flat arrays ``(values, mask, out)``, pieces of a weight: writes the mask if there is a rule for it,
    and values * mask. With a rule pieces are whole rows."""
    kernels = compiled.kernels() if weight.numel() >= compiled.LEAST else None
    if kernels is None:
        return _multiply
    if rule is None:
        return kernels.multiply
    integers = np.dtype(np.int32 if weight.dtype is torch.float32 else np.int64)
    choose = compiled_chooser(integers, *rule, weight.shape[1], weight[0, 0].numel())
    assert choose is not None

    def mask_into(values: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
        choose(values.view(integers), mask)
        kernels.multiply(values, mask, out)

    return mask_into


def _multiply(values: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
    # Casting first takes half the time of a product of mixed types.
    np.copyto(out, mask)
    np.multiply(out, values, out=out)


def _rows(weight: Tensor) -> int:
    """Rows of a weight, [N, ..], that make a piece."""
    return max(1, _PIECE * len(weight) // weight.numel())


def is_small(rows: int, x: Tensor, weight: Tensor, mask: Tensor) -> bool:
    """Whether `product` is the way to contract `x`, of so many rows, with `weight`.

    Differentiation in forward mode does not know the product; it keeps to torch's operators.
    """
    return (
        0 < rows <= _FEW
        and weight.numel() >= _PIECE
        and weight.dtype in _KINDS
        and x.dtype is weight.dtype
        and x.device.type == "cpu"
        and type(x) in (Tensor, torch.nn.Parameter)
        and for_numpy(weight, mask)
        and not torch.is_autocast_enabled("cpu")
        and torch.autograd.forward_ad._current_level < 0
    )


def product(rows: Tensor, weight: Tensor, mask: Tensor | None, rule: Rule | None = None) -> Tensor:
    """``rows @ (weight * mask).T`` with the weight as a matrix; no gradient is recorded.

    Args:
        rows: [few, K].
        weight: [N, ..], contiguous, K elements a row.
        mask: bool, of the shape of the weight; None takes the weight as it is.
        rule: None, or how to choose the mask, which is written; `can_choose` must hold.

    Returns:
        [few, N].
    """
    result = rows.new_empty(rows.shape[0], weight.shape[0])
    if mask is None:
        return torch.mm(rows, weight.detach().flatten(1).t(), out=result)
    for part, values, multiply, scratch in _pieces(weight, mask, rule):
        multiply(values, scratch)
        torch.mm(rows, scratch.t(), out=result[:, part])
    return result


def product_gradients(
    gradient: Tensor,
    rows: Tensor,
    weight: Tensor,
    mask: Tensor,
    clean: bool,
    decay: float | None,
    needs_rows: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `product` with respect to rows, and to weight as a matrix.

    Args:
        gradient: [few, N].
        rows, weight, mask: as for `product`.
        clean: the weight is zero already where the mask says so.
        decay: None for the masked gradient of the weight; else that of the masked weight, plus decay * weight where
            the mask is False.
        needs_rows, needs_weight: what is asked for; the other is None.
    """
    to_rows = torch.zeros_like(rows) if needs_rows else None
    to_weight = rows.new_empty(len(weight), rows.shape[1]) if needs_weight else None
    for part, values, multiply, scratch in _pieces(weight, mask):
        own = gradient[:, part]
        if not clean:
            multiply(values, scratch)
        if to_rows is not None:
            to_rows.addmm_(own, values if clean else scratch)
        if to_weight is None:
            continue
        target = to_weight[part]
        if decay is None:
            multiply(torch.mm(own.t(), rows, out=scratch), target)
        else:
            torch.mm(own.t(), rows, out=target)
            target.add_(torch.sub(values, scratch, out=scratch), alpha=decay)
    return to_rows, to_weight


def _pieces(
    weight: Tensor, mask: Tensor, rule: Rule | None = None
) -> Iterator[tuple[slice, Tensor, Callable[[Tensor, Tensor], Any], Tensor]]:
    """Goes through a weight in pieces of whole rows, each of which holds until the next is asked for.

    Yields:
        Where the rows are, the rows as a matrix, what multiplies such a matrix by their mask and writes it to another,
        and a scratch like the rows. With a rule the multiplication, of the rows themselves, also writes the mask.
    """
    values = weight.detach().flatten(1)
    stay = mask.flatten(1).numpy()
    step = _rows(weight)
    scratches = values.new_empty(2, min(step, len(values)), values.shape[1])
    mask_into = None if compiled.kernels() is None else _masking(weight, rule)
    for start in range(0, len(values), step):
        part = slice(start, min(start + step, len(values)))
        scratch, cast = scratches[:, : part.stop - start]
        if mask_into is None:
            # The mask is cast once, with NumPy: torch's cast of booleans takes five times as long, and a product of two
            # kinds of elements would cast it each time.
            np.copyto(cast.numpy(), stay[part])
            multiply = functools.partial(_multiply_cast, cast)
        else:
            multiply = functools.partial(_multiply_compiled, mask_into, stay[part].reshape(-1))
        yield part, values[part], multiply, scratch


def _multiply_cast(mask: Tensor, values: Tensor, out: Tensor) -> None:
    torch.mul(values, mask, out=out)


def _multiply_compiled(mask_into: Callable[..., None], mask: np.ndarray, values: Tensor, out: Tensor) -> None:
    mask_into(values.numpy().reshape(-1), mask, out.numpy().reshape(-1))


def output_size(x: Tensor, kernel: tuple[int, ...], settings: tuple[Any, ...]) -> tuple[int, int]:
    """Height and width that a convolution of images [B, C, H, W] gives; settings as for ``aten.convolution``."""
    stride, padding, dilation = settings[:3]
    height, width = (
        (x.shape[2 + axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis in range(2)
    )
    return height, width


def _is_pointwise(kernel: tuple[int, ...], settings: tuple[Any, ...]) -> bool:
    return (*kernel, *settings[0]) == (1, 1, 1, 1) and not any(settings[1])


def gather(x: Tensor, kernel: tuple[int, ...], settings: tuple[Any, ...]) -> Tensor:
    """The inputs of each position of a convolution.

    Args:
        x: [B, C, H, W].
        kernel: height and width.
        settings: stride, padding and dilation first, as for ``aten.convolution``.

    Returns:
        [B * positions, C * kernel height * kernel width].
    """
    if _is_pointwise(kernel, settings):
        return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    stride, padding, dilation = settings[:3]
    columns = functional.unfold(x, kernel, dilation, padding, stride)
    rows = x.new_empty(columns.shape[0], columns.shape[2], columns.shape[1])
    for source, target in zip(columns, rows):
        # One image at a time: torch transposes matrices in blocks, but no batches of them.
        target.copy_(source.t())
    return rows.flatten(0, 1)


def scatter(rows: Tensor, shape: torch.Size, kernel: tuple[int, ...], settings: tuple[Any, ...]) -> Tensor:
    """The transpose of `gather`: sums rows into images of a shape."""
    batch, channels, height, width = shape
    if _is_pointwise(kernel, settings):
        return rows.view(batch, height, width, channels).permute(0, 3, 1, 2).contiguous()
    stride, padding, dilation = settings[:3]
    positions = rows.view(batch, -1, rows.shape[1])
    columns = rows.new_empty(batch, rows.shape[1], positions.shape[1])
    for source, target in zip(positions, columns):
        target.copy_(source.t())
    return functional.fold(columns, (height, width), kernel, dilation, padding, stride)
