"""Criteria that score channels: one a file, framework-free.

    >>> from openwork import importance
    >>> criterion = importance.get("balanced_l2")
    >>> scores = criterion.score(group, weights)  # weights: parameter name -> array  # doctest: +SKIP

A user's own criterion is an object with `Importance`'s `score`; it is passed in place of a name.
"""

from __future__ import annotations

from importlib import import_module

from openwork.errors import ConfigError, nearest
from openwork.importance._base import ArraySource, FloatArray, GradientSource, Importance

__all__ = ["ArraySource", "FloatArray", "GradientSource", "Importance", "get", "names"]

# Name -> (module, class); imported when asked for.
_CRITERIA = {
    "balanced_l2": ("_balanced_l2", "BalancedL2"),
    "fisher": ("_fisher", "Fisher"),
    "l1": ("_magnitude", "L1Magnitude"),
    "l2": ("_magnitude", "L2Magnitude"),
    "random": ("_random", "Random"),
    "taylor": ("_taylor", "Taylor"),
}


def names() -> list[str]:
    """Names of the built-in criteria, sorted."""
    return sorted(_CRITERIA)


def get(criterion: str | type[Importance] | Importance) -> Importance:
    """The criterion of that name; a class is instantiated, any object with a `score` is returned as it is.

    Raises:
        ConfigError: no criterion has that name, or the object has no `score`.
    """
    if isinstance(criterion, str):
        if criterion not in _CRITERIA:
            raise ConfigError(f"importance {criterion!r} is unknown; {nearest(criterion, _CRITERIA)}")
        module, name = _CRITERIA[criterion]
        built: Importance = getattr(import_module(f"{__name__}.{module}"), name)()
        return built
    if isinstance(criterion, type):
        criterion = criterion()
    if not callable(getattr(criterion, "score", None)):
        raise ConfigError(f"importance {criterion!r} has no method score(group, weights, gradients)")
    return criterion
