"""Names of the operators that openwork inserts into a graph: masks, 2:4 selection, fake quantisation.

All of them lie below a path component ``openwork_ops``, also after an import under another prefix. An operator there
that takes the place of a tensor (a masked weight, a quantised input) has that tensor as its first input, so analysis
sees through it by following input 0; everything else below the component belongs to how the mask or the range is
found, and is no part of the network.
"""

from __future__ import annotations

__all__ = ["COMPONENT", "GRADIENT", "is_helper", "seen_through"]

COMPONENT = "openwork_ops"

GRADIENT = "OpenworkMaskedWeight"
"""Gradient function of a product of weight and mask; ``import openwork.tensorflow`` registers it."""


def is_helper(name: str) -> bool:
    """Whether openwork inserted the operator (or made the tensor, or the control input) of that name."""
    return COMPONENT in name.removeprefix("^").partition(":")[0].split("/")


def seen_through(name: str, inputs: dict[str, str]) -> str:
    """The tensor that a chain of helpers stands for; `name` itself if no helper made it.

    Args:
        name: a tensor, ``node`` or ``node:0``.
        inputs: first data input of each node, by node name.
    """
    seen: set[str] = set()
    while is_helper(name):
        node = name.partition(":")[0]
        if node in seen or node not in inputs:
            break
        seen.add(node)
        name = inputs[node]
    return name
