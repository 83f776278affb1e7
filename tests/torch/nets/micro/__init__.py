"""Micro-nets: one structure each. `NETS` maps the name to the net, its inputs and what pruning must give."""

from nets.micro import (  # noqa: F401  (each import enters its nets into the table)
    attention,
    calls,
    computed_weights,
    convolution,
    grouped,
    normalisation,
    rearranging,
    sequence,
)
from nets.micro._registry import NETS, MicroNet, perturb

__all__ = ["NETS", "MicroNet", "perturb"]
