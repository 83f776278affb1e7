"""``openwork decompress``: the original of a compressed model."""

from __future__ import annotations

import click

from openwork.convert.console import OneLineCommand, progress_bar
from openwork.convert.job import decompress

__all__ = ["command"]


@click.command(
    "decompress",
    cls=OneLineCommand,
    help="Give the original of a model back that openwork convert has compressed, bit for bit.\n\n"
    "\b\nExample:\n  openwork decompress out/model.onnx model.onnx",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("source", metavar="IN")
@click.argument("output", metavar="OUT")
def command(source: str, output: str) -> None:
    """Entry point of the subcommand."""
    with progress_bar() as progress:
        written = decompress(source, output, progress)
    click.echo(", ".join(map(str, written)) + " written")
