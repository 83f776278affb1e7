"""The result of a search as a table in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from openwork.report._data import SearchReport, format_quantity

__all__ = ["print_table", "search_table"]


def search_table(report: SearchReport) -> Table:
    """Layer, channels before and after, sensitivity and cost removed; totals below."""
    solution, unit = report.solution, report.problem.cost.unit
    table = Table(
        title=f"{report.model}: {solution.ratio:.3f}x less {unit} (asked for {report.problem.compress_ratio:g}x)",
        title_justify="left",
        show_footer=True,
    )
    saved = solution.full_cost - solution.cost
    before, after = sum(row.before for row in report.rows), sum(row.after for row in report.rows)
    table.add_column("layer", "all", overflow="fold")
    table.add_column("channels", f"{before} -> {after}", justify="right")
    table.add_column("removed", f"{1 - after / before:.0%}" if before else "", justify="right")
    table.add_column("sensitivity removed", f"{report.loss:.3g}", justify="right")
    table.add_column(
        f"{unit} removed",
        f"{format_quantity(saved)} ({saved / solution.full_cost:.1%})",
        justify="right",
    )
    for row in report.rows:
        name = row.name + (f" (+{len(row.tied)} tied)" if row.tied else "")
        changed = row.after < row.before
        table.add_row(
            name,
            f"{row.before} -> {row.after}" if changed else str(row.before),
            f"{row.share:.0%}" if changed else "-",
            f"{row.loss:.3g}" if changed else "-",
            f"{format_quantity(row.saved)} ({row.saved / solution.full_cost:.1%})" if changed else "-",
            style=None if changed else "dim",
        )
    return table


def print_table(report: SearchReport, console: Console | None = None) -> None:
    """Print `search_table`, by default on stderr, so that a program's own output stays clean."""
    (console or Console(stderr=True)).print(search_table(report))
