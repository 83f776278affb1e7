"""Loading checkpoints: strictly, on the CPU, without executing anything."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from openwork.errors import FileError, WeightsError, nearest
from openwork.files import path_text
from openwork.torch.structure import one_line

__all__ = ["load_state", "read_checkpoint"]

_DAMAGED = re.compile("invalid load key|truncated|invalid magic number|corrupt", re.IGNORECASE)
# What DataParallel, DistributedDataParallel and torch.compile put before every key.
_PREFIXES = ("module.", "_orig_mod.")


def read_checkpoint(path: str | os.PathLike[str], name: str | None = None) -> dict[str, torch.Tensor]:
    """The state dict in a checkpoint file.

    Args:
        path: a file written by ``torch.save``.
        name: key of the state dict inside the checkpoint; None if the checkpoint is the state dict.

    Returns:
        Tensors by name, on the CPU.

    Raises:
        FileError: missing, a folder, unreadable.
        WeightsError: not a checkpoint, holds pickled code (which is not executed), or has no such key.
    """
    target = Path(path_text(path, "pth_file"))
    if name is not None and not isinstance(name, str):
        raise WeightsError(f"state_dict_name is {name!r}; None or a key of the file, as str, is needed")
    if target.is_dir():
        raise FileError(f"weights file {target} is a folder; a file is needed")
    if not target.exists():
        raise FileError(f"weights file {target} does not exist")
    try:
        content = torch.load(target, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = "it is damaged" if _DAMAGED.search(str(error)) else "it holds pickled code, which is not executed"
        raise WeightsError(
            f"weights file {target} cannot be read: {reason}; save the model's state_dict() with torch.save"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, OSError, AttributeError) as error:
        # Old checkpoints are bare pickles: of what is none, torch tells only a byte or nothing.
        text = " ".join(str(error).split())[:200]
        why = f": {text}" if " " in text else ""
        raise WeightsError(f"weights file {target} is no checkpoint of torch.save, or is cut short{why}") from error
    if name is not None:
        if not isinstance(content, Mapping) or name not in content:
            keys = [str(key) for key in content] if isinstance(content, Mapping) else []
            hint = nearest(name, keys) if keys else "it holds no names"
            if keys and all(isinstance(value, torch.Tensor) for value in content.values()):
                hint = "it is a state dict itself, leave state_dict_name out"
            raise WeightsError(f"weights file {target} has no key {name!r} (state_dict_name); {hint}")
        content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise WeightsError(f"weights file {target} holds a {type(content).__name__}; a state dict is needed")
    state = dict(content)
    wrong = [
        key for key, value in state.items() if not isinstance(value, torch.Tensor) and not key.endswith("_extra_state")
    ]
    if wrong:
        inner = [key for key, value in state.items() if isinstance(value, Mapping)]
        hint = f"; give state_dict_name, one of {', '.join(map(repr, inner[:4]))}" if inner else ""
        raise WeightsError(
            f"weights file {target}: {wrong[0]!r} is a {type(state[wrong[0]]).__name__}, no tensor{hint}"
        )
    return state


def without_prefix(state: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The state without the prefixes that wrappers put before all of its keys.

    Args:
        state: the state dict.
        own: the model's keys; a model whose own keys begin with ``module.`` keeps that.
    """
    result = dict(state)
    while result and own:
        for prefix in _PREFIXES:
            bare = {key.removeprefix(prefix): value for key, value in result.items() if key.startswith(prefix)}
            kept = all(key.startswith(prefix) for key in own)
            if len(bare) == len(result) and (not kept or all(key.startswith(prefix) for key in bare)):
                result = bare
                break
        else:
            break
    return result


def load_state(model: nn.Module, state: Mapping[str, Any], source: str) -> None:
    """Load a state dict strictly; on any error the model keeps its weights.

    A prefix that a wrapper (DataParallel, torch.compile) put before all keys is taken off. Parameters on the meta
    device become those of the file.

    Raises:
        WeightsError: keys are missing or unexpected, or a shape or kind of number differs; names the first.
    """
    own = model.state_dict()
    state = without_prefix(state, own)
    missing = [key for key in own if key not in state]
    extra = [key for key in state if key not in own]
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"misses {missing[0]!r}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""))
        if extra:
            parts.append(
                f"has {extra[0]!r}"
                + (f" and {len(extra) - 1} more" if len(extra) > 1 else "")
                + f", which the model does not know ({nearest(extra[0], own)})"
            )
        raise WeightsError(f"weights file {source} does not fit the model: it {' and '.join(parts)}")
    for key, value in own.items():
        given = state[key]
        if isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor) and value.shape != given.shape:
            raise WeightsError(
                f"weights file {source}: {key!r} has shape {list(given.shape)}; the model of this record needs "
                f"{list(value.shape)}"
            )
        kinds = isinstance(value, torch.Tensor) and isinstance(given, torch.Tensor)
        if kinds and value.is_floating_point() != given.is_floating_point():
            raise WeightsError(f"weights file {source}: {key!r} is {given.dtype}; the model needs {value.dtype}")
    on_meta = any(isinstance(value, torch.Tensor) and value.is_meta for value in own.values())
    try:
        model.load_state_dict(state, strict=True, assign=on_meta)
    except RuntimeError as error:
        raise WeightsError(f"weights file {source} does not fit the model: {one_line(error)}") from error
