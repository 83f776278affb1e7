"""Lets torchvision be imported beside a build of PyTorch that its compiled part was not made for."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from pathlib import Path

__all__ = ["allow_torchvision"]


@functools.cache
def allow_torchvision() -> object:
    """Declare the operators of torchvision's compiled part, where that part cannot be loaded.

    Call before the first import of torchvision, which asks for no more than that they are declared. Does nothing
    where torchvision is not installed, or whole.

    Returns:
        What keeps the declarations alive.
    """
    import torch

    found = importlib.util.find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        return None
    for compiled in Path(found.submodule_search_locations[0]).glob("_C*"):
        with contextlib.suppress(OSError, RuntimeError):
            torch.ops.load_library(str(compiled))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
