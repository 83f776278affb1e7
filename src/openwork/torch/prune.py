"""Remove channels with everything that depends on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from openwork.errors import ConfigError, ModelError, NothingToPruneError, nearest
from openwork.graph.groups import IntArray
from openwork.graph.plan import Plan
from openwork.retrain.ratio import (
    check_share,
    criterion_of_weights,
    lies_in,
    named_units,
    nothing_goes,
    paths_given,
    units_by_ratio,
)
from openwork.torch.analysis import Analysis, _analyze
from openwork.torch.pretrained import config_repairs
from openwork.torch.structure import all_tensors, unwrap
from openwork.torch.surgery import apply_plan

__all__ = ["PrunePlan", "plan_of", "prune", "weights_of"]


class PrunePlan(Plan):
    """A plan for a torch model. It is data: it applies to a fresh model without analysis."""

    @torch.inference_mode(False)
    def apply(self, model: nn.Module) -> nn.Module:
        """A pruned copy of `model`, which is not touched.

        Raises:
            RecordError: the plan is of another model.
        """
        return apply_plan(unwrap(model), self)


def weights_of(model: nn.Module) -> Callable[[str], np.ndarray]:
    """Parameters and buffers of a model as arrays (half types as float32), by qualified name, cached."""
    tensors = all_tensors(model, duplicates=True)
    cache: dict[str, np.ndarray] = {}

    def weights(name: str) -> np.ndarray:
        if name not in cache:
            tensor = tensors[name].detach()
            if tensor.is_meta:
                raise ModelError(f"parameter {name!r} is on the meta device; ranking channels needs its values")
            if tensor.dtype in (torch.float16, torch.bfloat16):
                tensor = tensor.float()
            cache[name] = tensor.cpu().numpy()
        return cache[name]

    return weights


def plan_of(analysis: Analysis, removed: Mapping[int, IntArray]) -> PrunePlan | None:
    """The plan when these units of these groups go; None as from `Analysis.plan`."""
    found = analysis.plan(removed)
    if found is None:
        return None
    cuts, repairs = found
    return PrunePlan(cuts, (*repairs, *config_repairs(analysis, removed, cuts, repairs)))


@torch.inference_mode(False)
def prune(
    model: nn.Module,
    inputs: Any,
    ratio: float = 0.5,
    round_to: int = 1,
    importance: Any = "balanced_l2",
    skip: Collection[str] = (),
    groups: Mapping[int, IntArray] | None = None,
    analysis: Analysis | None = None,
) -> tuple[nn.Module, PrunePlan]:
    """Prune every group of channels that a weight produces.

    Args:
        model: the model; it is not touched. A DataParallel or DistributedDataParallel wrapper is looked through.
        inputs: what forward takes: a tensor, a tuple of positional arguments, a dict of keyword arguments.
        ratio: share of each group's units to remove, in (0, 1).
        round_to: kept channels are rounded up to a multiple of this where the group is large enough.
        importance: name of a criterion (`openwork.importance.names`), or an object with ``score(group, weights)``.
        skip: module paths; a group with a producer in one of them (or below it) is left alone.
        groups: instead of a ratio: which units of which group (``analyze(...).groups``) go.
        analysis: what `analyze` gave for this model and these inputs, so that it is not made again.

    Returns:
        A smaller copy of the model, of the same class, and the plan that made it.

    Raises:
        ConfigError: a bad argument.
        NothingToPruneError: no group may be pruned (says what is frozen).
        ModelError: the forward fails (says where).
        UnsupportedModelError: not an nn.Module, or a ScriptModule.
    """
    check_share(ratio, round_to)
    skip = paths_given(skip, groups)
    criterion_of_weights(importance)
    if analysis is None:
        analysis = _analyze(model, inputs)
    elif not isinstance(analysis, Analysis):
        raise ConfigError(f"analysis is a {type(analysis).__name__}; what analyze(model, inputs) gives is needed")
    elif analysis.model is not unwrap(model):
        raise ConfigError(f"analysis is of another {type(analysis.model).__name__}; give analyze(model, inputs)")
    _check_skip(analysis.model, skip)
    weights = weights_of(analysis.model)
    if groups is not None:
        analysis.check()
        plan = plan_of(analysis, named_units(analysis.groups, groups))
        if plan is None:
            raise ConfigError("groups: the model's code does not allow this choice; see analyze(...).frozen")
    else:
        plan = None
        while plan is None:
            chosen = units_by_ratio(
                analysis.groups, ratio, round_to, importance, weights, lambda group: lies_in(group, skip)
            )
            if not chosen:
                raise NothingToPruneError(nothing_goes(type(analysis.model).__name__, analysis.groups, analysis.frozen))
            plan = plan_of(analysis, chosen)
    return apply_plan(analysis.model, plan), plan


def _check_skip(model: nn.Module, skip: Collection[str]) -> None:
    names = {name for name, _ in model.named_modules() if name} if skip else set()
    for path in skip:
        if path not in names:
            raise ConfigError(f"skip: {path!r} is no module of {type(model).__name__}; {nearest(path, names)}")
