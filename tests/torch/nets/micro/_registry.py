"""The table of micro-nets: each class is one structure, small enough to run in milliseconds.

What a net states (`kept`, `frozen`) follows from the structure by reasoning, never from what the engine said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["NETS", "MicroNet", "floats", "image", "micro", "perturb", "tokens"]

Inputs = Callable[[], Any]


@dataclass(frozen=True)
class MicroNet:
    """One structure and what must come out of pruning it.

    Attributes:
        name: the class name in snake case.
        factory: the module class.
        inputs: makes the example inputs: a tensor, a tuple, or a dict of keyword tensors.
        kept: parameter name -> shape after ``prune(ratio=ratio)``; parameters not named are not judged.
        frozen: names of parameters of which `analysis.frozen` must name at least one axis.
        ratio: the ratio that `kept` is about.
        round_to: the alignment that `kept` is about.
        nothing: no channel of it may be removed, so `prune` must raise `NothingToPruneError`.
        optional: freezing all of it is as right as pruning it.
    """

    name: str
    factory: Callable[[], nn.Module]
    inputs: Inputs
    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    ratio: float = 0.5
    round_to: int = 1
    nothing: bool = False
    optional: bool = False

    def build(self) -> nn.Module:
        """A fresh model in evaluation mode; the same weights at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.factory()
            perturb(model)
        return model.eval()

    def example(self) -> Any:
        """The same example inputs at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.inputs()


NETS: dict[str, MicroNet] = {}


def micro(
    inputs: Inputs,
    kept: Mapping[str, tuple[int, ...]] | None = None,
    frozen: tuple[str, ...] = (),
    ratio: float = 0.5,
    round_to: int = 1,
    nothing: bool = False,
    optional: bool = False,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Class decorator that enters a module class into `NETS`."""

    def enter(factory: type[nn.Module]) -> type[nn.Module]:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", factory.__name__).lower()
        if name in NETS:
            raise ValueError(f"micro-net {name!r} is defined twice")
        NETS[name] = MicroNet(name, factory, inputs, dict(kept or {}), frozen, ratio, round_to, nothing, optional)
        return factory

    return enter


def image(channels: int = 3, *size: int, batch: int = 2) -> Inputs:
    """Inputs: one normal tensor [batch, channels, *size] (8 x 8 unless given)."""
    shape = (batch, channels, *(size or (8, 8)))
    return lambda: torch.randn(shape)


def floats(*shapes: tuple[int, ...]) -> Inputs:
    """Inputs: one normal tensor per shape; a lone tensor when there is one shape."""

    def make() -> Any:
        made = tuple(torch.randn(shape) for shape in shapes)
        return made if len(made) > 1 else made[0]

    return make


def tokens(vocabulary: int, length: int, batch: int = 2) -> Inputs:
    """Inputs: one int64 tensor [batch, length] in ``range(vocabulary)``."""
    return lambda: torch.randint(0, vocabulary, (batch, length))


def perturb(model: nn.Module) -> None:
    """Move every parameter and floating statistic away from its initial 0 or 1.

    At their initial values (bias 0, weight 1, mean 0, variance 1) a wrongly cut norm would go unseen. Weights of
    more than one dimension are already random. Variances stay positive.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1 or bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.uniform_(-0.5, 0.5)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
