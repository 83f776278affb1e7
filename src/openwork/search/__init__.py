"""Which channels to remove where, so that a budget is met and the least is lost.

`SearchProblem` is the problem as data, `solve_greedy` and `solve_dynamic` solve it. `SensitivityBase` and
`SearchChannelBase` are what users subclass; `GreedySearch` and `DynamicProgrammingSearch` are built in.
"""

from __future__ import annotations

from openwork.errors import ConfigError, nearest
from openwork.search._algorithms import DynamicProgrammingSearch, GreedySearch
from openwork.search._base import SearchChannelBase, SensitivityBase
from openwork.search._dynamic import solve_dynamic
from openwork.search._greedy import solve_greedy
from openwork.search._problem import SearchGroup, SearchProblem, Solution, group_widths, permitted_widths
from openwork.search._records import get_attribute, make_record, set_attribute

__all__ = [
    "DynamicProgrammingSearch",
    "GreedySearch",
    "SearchChannelBase",
    "SearchGroup",
    "SearchProblem",
    "SensitivityBase",
    "Solution",
    "get_algorithm",
    "get_attribute",
    "group_widths",
    "make_record",
    "permitted_widths",
    "set_attribute",
    "solve_dynamic",
    "solve_greedy",
]

_ALGORITHMS: dict[str, type[SearchChannelBase]] = {
    "DynamicProgrammingSearch": DynamicProgrammingSearch,
    "GreedySearch": GreedySearch,
}


def get_algorithm(algorithm: str | type[SearchChannelBase] | SearchChannelBase) -> SearchChannelBase:
    """The search algorithm of that name; a class is instantiated, an object is returned as it is.

    Raises:
        ConfigError: no algorithm has that name, or the object has no `channel_prune_search`.
    """
    if isinstance(algorithm, str):
        if algorithm not in _ALGORITHMS:
            raise ConfigError(f"search_alg {algorithm!r} is unknown; {nearest(algorithm, _ALGORITHMS)}")
        return _ALGORITHMS[algorithm]()
    if isinstance(algorithm, type):
        algorithm = algorithm()
    if not callable(getattr(algorithm, "channel_prune_search", None)):
        raise ConfigError(f"search_alg {algorithm!r} has no method channel_prune_search")
    return algorithm
