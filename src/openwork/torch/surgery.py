"""Apply a plan: cut parameters and buffers, and set the attributes that state sizes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from openwork.errors import RecordError, nearest
from openwork.graph.plan import Cut, Plan, Repair
from openwork.torch.structure import all_tensors, copy_structure

__all__ = ["apply_plan", "check_plan", "cut_tensor", "set_attribute"]


def cut_tensor(tensor: torch.Tensor, cuts: list[Cut]) -> torch.Tensor:
    """The tensor without the removed positions, on its device, contiguous."""
    result = tensor
    cuts = _joined(cuts)
    # A grouped inner axis is cut per block of rows, so plain axes first: rows stay sorted by block.
    for cut in sorted(cuts, key=lambda c: c.blocks > 1):
        kept = torch.from_numpy(cut.kept)
        if cut.blocks == 1:
            result = result.index_select(cut.axis, kept.to(result.device))
            continue
        per_block = cut.size // cut.blocks
        index = kept.reshape(cut.blocks, -1) % per_block
        rows = result.shape[0] // cut.blocks
        shape = list(result.shape)
        shape[1] = index.shape[1]
        expanded = index.repeat_interleave(rows, 0).to(result.device)
        expanded = expanded.reshape(*expanded.shape, *(1,) * (result.dim() - 2)).expand(shape)
        result = result.gather(1, expanded)
    if result is tensor:
        return tensor
    memory = torch.channels_last if tensor.dim() == 4 and _channels_last(tensor) else torch.contiguous_format
    return result.contiguous(memory_format=memory)


def _joined(cuts: list[Cut]) -> list[Cut]:
    """One cut per axis: several groups may each remove some of its positions (a concatenation is read)."""
    by_axis: dict[tuple[int, int], list[Cut]] = defaultdict(list)
    for cut in cuts:
        by_axis[cut.axis, cut.blocks].append(cut)
    return [
        parts[0]
        if len(parts) == 1
        else replace(parts[0], removed=np.unique(np.concatenate([part.removed for part in parts])))
        for parts in by_axis.values()
    ]


def _channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _check(model: nn.Module, cuts: dict[str, list[Cut]]) -> None:
    tensors = all_tensors(model, duplicates=True)
    for name, parts in cuts.items():
        if name not in tensors:
            raise RecordError(
                f"parameter {name!r} of the plan is not in {type(model).__name__}; {nearest(name, tensors)}"
            )
        tensor = tensors[name]
        for cut in parts:
            if cut.axis >= tensor.dim() or tensor.shape[cut.axis] * cut.blocks != cut.size:
                raise RecordError(
                    f"parameter {name!r} has shape {list(tensor.shape)}; the plan needs {cut.size // cut.blocks} "
                    f"on axis {cut.axis} (it is of another model, or already pruned)"
                )
            if cut.blocks > 1 and cut.axis != 1:
                raise RecordError(f"parameter {name!r}: blocks on axis {cut.axis}; only axis 1 can have them")


def check_plan(model: nn.Module, plan: Plan) -> dict[str, list[Cut]]:
    """The cuts by parameter, after a check that they fit.

    Raises:
        RecordError: the plan is of another model.
    """
    cuts: dict[str, list[Cut]] = defaultdict(list)
    for cut in plan.cuts:
        cuts[cut.parameter].append(cut)
    _check(model, cuts)
    return cuts


def apply_plan(model: nn.Module, plan: Plan) -> nn.Module:
    """A smaller copy of `model`; the model itself is not touched.

    Raises:
        RecordError: the plan is of another model.
    """
    cuts = check_plan(model, plan)
    aliases = _first_names(model)

    def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        parts = [cut for alias in aliases[name] for cut in cuts.get(alias, ())]
        with torch.no_grad():
            if not parts:
                return tensor if tensor.device.type == "meta" else tensor.detach().clone()
            return cut_tensor(tensor.detach(), parts)

    result = copy_structure(model, convert)
    for repair in plan.repairs:
        set_attribute(result, repair)
    return result


def _first_names(model: nn.Module) -> dict[str, list[str]]:
    """Canonical name of each parameter or buffer -> all its names."""
    canonical: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in all_tensors(model, duplicates=True).items():
        first = canonical.setdefault(id(tensor), name)
        names.setdefault(first, []).append(name)
    return names


def set_attribute(model: nn.Module, repair: Repair) -> None:
    """Set one attribute, or one of the object that an attribute holds ("config.hidden_size"); lists are restored to
    the type that stands there.

    Raises:
        RecordError: no such module or attribute, or it does not have the old value.
    """
    try:
        module = model.get_submodule(repair.module)
    except AttributeError as error:
        names = [name for name, _ in model.named_modules()]
        raise RecordError(
            f"module {repair.module!r} of the plan is not in the model; {nearest(repair.module, names)}"
        ) from error
    owner: Any = module
    *holders, attribute = repair.attribute.split(".")
    for place, holder in enumerate((*holders, attribute)):
        if holder not in getattr(owner, "__dict__", {}):
            where = ".".join((repr(repair.module), *holders[:place]))
            raise RecordError(
                f"module {where} has no attribute {holder!r}; {nearest(holder, getattr(owner, '__dict__', {}))}"
            )
        if place < len(holders):
            owner = vars(owner)[holder]
    found = vars(owner)[attribute]
    if _listed(found) not in (_listed(repair.old), _listed(repair.new)):
        raise RecordError(
            f"module {repair.module!r}: {repair.attribute} is {found!r}; the plan needs {repair.old!r} "
            "(it is of another model, or already pruned)"
        )
    setattr(owner, attribute, like(found, repair.new))


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def like(template: Any, value: Any) -> Any:
    """`value` with the container types of `template`."""
    if isinstance(template, torch.Size):
        return torch.Size(value)
    if isinstance(template, tuple) and isinstance(value, (list, tuple)):
        items = [like(t, v) for t, v in zip(template, value, strict=True)]
        return type(template)(*items) if hasattr(template, "_fields") else tuple(items)
    if isinstance(template, list) and isinstance(value, (list, tuple)):
        return [like(t, v) for t, v in zip(template, value, strict=True)]
    return value
