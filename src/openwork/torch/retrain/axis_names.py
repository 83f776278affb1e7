"""Names of dynamic axes in what torch's newer exporter returns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["name_axes"]

_WORD = re.compile(r"[^\W\d]\w*")


def name_axes(program: Any, dynamic_axes: Mapping[str, Any] | None) -> None:
    """Give the dynamic axes of an exported program's inputs the names asked for, everywhere they occur.

    Some releases of torch, 2.8 for one, drop the names and invent their own (``s77``); where the names are right
    already, nothing is touched. Two axes that the exporter found to be always equal share one name, the first.

    Args:
        program: a ``torch.onnx.ONNXProgram``, changed in place.
        dynamic_axes: ``{name of an input or output: {axis: name}}``. Lists of axes ask for no names, and an output's
            axes follow from the inputs'.
    """
    graph = program.model.graph
    wanted: dict[str, str] = {}
    for value in graph.inputs:
        axes = (dynamic_axes or {}).get(value.name)
        if not isinstance(axes, Mapping) or value.shape is None:
            continue
        for axis, name in axes.items():
            # A plain number stands where the exporter found the axis to be fixed.
            invented = getattr(value.shape[axis], "value", None)
            if isinstance(invented, str):
                wanted.setdefault(invented, name)
    if all(invented == name for invented, name in wanted.items()):
        return
    values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
    for value in values:
        if value.shape is None:
            continue
        dims = [getattr(dim, "value", dim) for dim in value.shape]
        named = [_renamed(dim, wanted) if isinstance(dim, str) else dim for dim in dims]
        if named != dims:
            value.shape = type(value.shape)(named)


def _renamed(expression: str, names: Mapping[str, str]) -> str:
    """An expression of axes, as ``2*s77 + 1``, with other names."""
    return _WORD.sub(lambda word: names.get(word[0], word[0]), expression)
