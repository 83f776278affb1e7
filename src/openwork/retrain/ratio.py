"""Which units go when a share of every group is asked for, or units are named."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from openwork import importance as criteria
from openwork.errors import ConfigError
from openwork.graph.groups import Frozen, IntArray, PruneGroup
from openwork.graph.select import balanced, lowest, removable, sparing
from openwork.importance import ArraySource

__all__ = [
    "check_share",
    "criterion_of_weights",
    "lies_in",
    "named_units",
    "nothing_goes",
    "paths_given",
    "units_by_ratio",
]


def check_share(ratio: Any, round_to: Any) -> None:
    """Raise ConfigError unless the ratio is in (0, 1) and `round_to` a positive integer."""
    if not (isinstance(ratio, (int, float)) and math.isfinite(ratio) and 0 < ratio < 1):
        raise ConfigError(f"ratio is {ratio!r}; it must be greater than 0 and less than 1")
    if not isinstance(round_to, int) or isinstance(round_to, bool) or round_to < 1:
        raise ConfigError(f"round_to is {round_to!r}; it must be an integer of at least 1")


def criterion_of_weights(importance: Any) -> criteria.Importance:
    """The criterion that an argument ``importance`` names.

    Raises:
        ConfigError: there is none of this name, or it needs more than weights.
    """
    criterion = criteria.get(importance)
    if getattr(criterion, "needs_gradients", False):
        alone = ", ".join(repr(n) for n in criteria.names() if not getattr(criteria.get(n), "needs_gradients", False))
        raise ConfigError(
            f"importance is {criterion.name!r}, which needs gradients; score the groups with it yourself and give "
            f"groups, or use one of {alone}"
        )
    return criterion


def lies_in(group: PruneGroup, paths: Collection[str], separator: str = ".") -> bool:
    """Whether a layer that produces the group is one of these, or below one of them."""
    return any(
        member.module == path or member.module.startswith(path + separator)
        for member in group.producers
        for path in paths
    )


def paths_given(skip: Any, groups: Any) -> tuple[str, ...]:
    """The paths of the argument ``skip``, after a check of its kind and of that of ``groups``.

    Raises:
        ConfigError: skip is no path and no list of paths; groups is neither None nor a dict.
    """
    paths = (skip,) if isinstance(skip, str) else skip
    if not isinstance(paths, Collection) or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"skip is {skip!r}; a path or a list of paths is needed")
    if groups is not None and not isinstance(groups, Mapping):
        raise ConfigError(f"groups is a {type(groups).__name__}; a dict is needed: {{group index: unit numbers}}")
    return tuple(paths)


def units_by_ratio(
    groups: Sequence[PruneGroup],
    ratio: float,
    round_to: int,
    importance: Any,
    weights: ArraySource,
    skipped: Callable[[PruneGroup], bool],
) -> dict[int, IntArray]:
    """The least important units of each group.

    Args:
        groups: the model's groups.
        ratio: share of each group's units to remove.
        round_to: kept channels are rounded up to a multiple of this where the group is large enough.
        importance: name of a criterion, or an object with ``score(group, weights)``.
        weights: arrays by parameter name.
        skipped: groups that are left alone.

    Raises:
        ConfigError: no such criterion, or its scores have another shape or are not finite.
    """
    criterion = criterion_of_weights(importance)
    chosen = {}
    for group in groups:
        count = 0 if skipped(group) else removable(group, ratio, round_to)
        if count:
            chosen[group.index] = lowest(group, _scores(criterion, importance, group, weights), count)
    return sparing(groups, chosen)


def _scores(criterion: Any, name: Any, group: PruneGroup, weights: ArraySource) -> np.ndarray:
    scores = np.asarray(criterion.score(group, weights), dtype=np.float64)
    where = f"importance {name!r}: the scores of group {group.index}"
    if scores.shape != (group.units,):
        raise ConfigError(f"{where} have shape {list(scores.shape)}; [{group.units}] is needed")
    if not np.isfinite(scores).all():
        raise ConfigError(f"{where} are not all finite (weights with NaN or infinity?)")
    return scores


def named_units(all_groups: Sequence[PruneGroup], groups: Mapping[int, IntArray]) -> dict[int, IntArray]:
    """Units that the caller names, after a check that they may go.

    Raises:
        ConfigError: no such group or unit, or a number of units that the group does not allow.
    """
    chosen: dict[int, IntArray] = {}
    for index, units in groups.items():
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)) or not 0 <= index < len(all_groups):
            raise ConfigError(f"groups: {index!r} is no group; allowed: 0..{len(all_groups) - 1}")
        group = all_groups[index]
        try:
            given = np.asarray(units)
        except ValueError as error:
            raise ConfigError(f"groups[{index}] is {units!r}; a list of unit numbers is needed") from error
        if given.size and given.dtype.kind not in "iu":
            raise ConfigError(f"groups[{index}] holds {given.dtype} values; unit numbers are needed")
        array = np.unique(given.astype(np.int64))
        if len(array) and (array[0] < 0 or array[-1] >= group.units):
            raise ConfigError(f"groups[{index}]: unit {array[-1]} is not in 0..{group.units - 1}")
        if len(array) and not balanced(group, array):
            raise ConfigError(
                f"groups[{index}]: {len(array)} units; from its {group.blocks} blocks go {group.steps.tolist()} units "
                f"at a time, at most {group.most_steps} times"
            )
        chosen[index] = array
    return chosen


def nothing_goes(name: str, groups: Sequence[PruneGroup], frozen: Sequence[Frozen]) -> str:
    """Words for the error when no group may be pruned."""
    if groups:
        return f"nothing to prune in {name}: {len(groups)} groups, all skipped or too small for this ratio"
    reasons = "; ".join(item.reason for item in frozen[:3])
    if len(frozen) > 3:
        reasons += f"; and {len(frozen) - 3} more reasons"
    return f"nothing to prune in {name}: no channel may be removed ({reasons or 'it has no weights'})"
