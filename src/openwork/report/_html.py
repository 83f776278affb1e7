"""The result of a search as one HTML page that needs no network: style and charts are inside."""

from __future__ import annotations

import os
from importlib import resources

from openwork import __version__
from openwork.errors import OpenworkError
from openwork.files import write_text
from openwork.report import _svg
from openwork.report._data import SearchReport, format_quantity

__all__ = ["render_html", "write_html"]

_MOST_BARS = 150


def render_html(report: SearchReport) -> str:
    """The page's text.

    Raises:
        OpenworkError: Jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise OpenworkError("report.html needs Jinja2; install openwork[report]") from error
    source = resources.files("openwork.report").joinpath("search.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    solution = report.solution
    percent = 100 / report.total_loss
    costs = [row for row in report.layer_costs if row[1] > 0]
    shown = costs
    if len(costs) > _MOST_BARS:
        dearest = {name for name, _, _ in sorted(costs, key=lambda row: -row[1])[:_MOST_BARS]}
        shown = [row for row in costs if row[0] in dearest]
    rows = [
        {
            "row": row,
            "kept": 100 * row.after / row.before,
            "loss": row.loss * percent,
            "saved": format_quantity(row.saved),
            "saved_share": 100 * row.saved / solution.full_cost,
            "chart": _svg.sparkline(row.curve, row.after),
        }
        for row in report.rows
    ]
    before, after = sum(row.before for row in report.rows), sum(row.after for row in report.rows)
    return environment.from_string(source).render(
        report=report,
        version=__version__,
        unit=report.problem.cost.unit,
        target=report.problem.compress_ratio,
        ratio=solution.ratio,
        cost_before=format_quantity(solution.full_cost),
        cost_after=format_quantity(solution.cost),
        channels_before=before,
        channels_after=after,
        loss=report.loss * percent,
        rows=rows,
        left_out=len(costs) - len(shown),
        budget_chart=_svg.budget_chart(
            [(ratio, loss * percent) for ratio, loss in report.curve],
            (solution.ratio, report.loss * percent),
            report.problem.compress_ratio,
        ),
        cost_chart=_svg.bars(shown, [(format_quantity(was), format_quantity(now)) for _, was, now in shown]),
    )


def write_html(report: SearchReport, path: str | os.PathLike[str]) -> None:
    """Write `render_html` to a file, whole or not at all.

    Raises:
        OpenworkError: Jinja2 is not installed.
        FileError: the file cannot be written.
    """
    write_text(path, render_html(report))
