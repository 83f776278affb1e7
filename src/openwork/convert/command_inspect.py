"""``openwork inspect``: the converter's report, without writing anything."""

from __future__ import annotations

import json

import click

from openwork.convert.command import _FRAMEWORKS
from openwork.convert.console import OneLineCommand, progress_bar, whole_number
from openwork.convert.job import inspect
from openwork.convert.report import render

__all__ = ["command"]


@click.command(
    "inspect",
    cls=OneLineCommand,
    help="Say which layers of a model have 2:4 weights, and why the others do not.\n\n"
    "\b\nExample:\n  openwork inspect model.onnx",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("model")
@click.option("--framework", default="5", show_default=True, metavar="N", help=f"{_FRAMEWORKS}.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(model: str, framework: str, as_json: bool) -> None:
    """Entry point of the subcommand."""
    with progress_bar() as progress:
        report = inspect(model, whole_number("--framework", framework, _FRAMEWORKS), progress)
    click.echo(json.dumps(report.as_json(), indent=1) if as_json else render(report))
