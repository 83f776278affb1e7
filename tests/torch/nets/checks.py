"""Helpers for the tests and benchmarks: calling models, collecting tensors, counting MACs, comparing states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

__all__ = [
    "difference",
    "example_call",
    "forward_backward",
    "multiply_accumulates",
    "same_state",
    "snapshot",
    "tensors",
]


def example_call(model: nn.Module, inputs: Any) -> Any:
    """Call `model` on a tensor, a tuple of positional or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a nest of mappings, sequences and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for field in dataclasses.fields(value) for t in tensors(getattr(value, field.name))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def forward_backward(model: nn.Module, inputs: Any) -> None:
    """Run forward and backward; fail on no output, on numbers that are not finite, or on no gradient at all."""
    model.zero_grad()
    outputs = [tensor for tensor in tensors(example_call(model, inputs)) if tensor.is_floating_point()]
    assert outputs, "no floating-point output"
    assert all(bool(torch.isfinite(output).all()) for output in outputs), "output is not finite"
    sum(output.float().square().sum() for output in outputs if output.requires_grad).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients, "no gradient"
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients), "gradient is not finite"
    model.zero_grad()


def multiply_accumulates(model: nn.Module, inputs: Any) -> float:
    """Multiply-accumulates of one forward pass, counted by torch.

    Fused attention is run as the products it is made of: the counter does not know all of its kernels. Gradients are
    off for parameters too: the counter's module tracker fails on a parameter that is handed to a submodule.
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            example_call(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for parameter in learning:
            parameter.requires_grad_(True)
    return counter.get_total_flops() / 2


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of parameters and buffers, the persistent and the others."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach().clone() for name, tensor in named}


def same_state(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether two snapshots are equal bit by bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def difference(first: Any, second: Any) -> float:
    """Largest absolute difference over the largest absolute value, over all tensors of two outputs."""
    left, right = tensors(first), tensors(second)
    assert [t.shape for t in left] == [t.shape for t in right], "outputs of different shapes"
    largest = max((float(t.abs().max()) for t in left if t.numel()), default=0.0)
    worst = max((float((a - b).abs().max()) for a, b in zip(left, right) if a.numel()), default=0.0)
    return worst / largest if largest else worst
