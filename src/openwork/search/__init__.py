"""Which channels to remove where, so that a budget is met and the least is lost."""

from openwork.search._dynamic import solve_dynamic
from openwork.search._greedy import solve_greedy
from openwork.search._problem import SearchGroup, SearchProblem, Solution, permitted_widths

__all__ = [
    "SearchGroup",
    "SearchProblem",
    "Solution",
    "permitted_widths",
    "solve_dynamic",
    "solve_greedy",
]
