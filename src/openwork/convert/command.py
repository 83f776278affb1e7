"""``openwork convert``: ATC's options, for any hardware."""

from __future__ import annotations

import click

from openwork.convert.console import OneLineCommand, progress_bar, set_log_level, whole_number
from openwork.convert.job import EMITS, FRAMEWORKS, Options, convert
from openwork.convert.report import render

__all__ = ["command"]

_EXAMPLE = """\b
Example:
  openwork convert --model model.onnx --framework 5 --output out/model --sparsity 1
writes out/model.onnx, which onnxruntime runs with the same results, and the
report out/model.json.

\b
Exit codes: 0 done, 1 a wrong option, file or model, 3 --strict and a layer
does not qualify."""

_FRAMEWORKS = ", ".join(f"{number} ({name})" for number, name in FRAMEWORKS.items())


@click.command(
    "convert",
    cls=OneLineCommand,
    help="Find 2:4 weights in a model and store them compressed.\n\n" + _EXAMPLE,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--model", required=True, metavar="FILE", help="The model: .onnx, frozen .pb, or SavedModel folder.")
@click.option("--framework", default="5", show_default=True, metavar="N", help=f"{_FRAMEWORKS}.")
@click.option("--output", required=True, metavar="PATH", help="Path of the result without suffix.")
@click.option(
    "--sparsity", default="0", show_default=True, metavar="0|1", help="1: compress 2:4 weights. 0: convert only."
)
@click.option("--input_shape", "--input-shape", metavar="TEXT", help='Input shapes: "x:1,3,224,224;y:1,10".')
@click.option("--out_nodes", "--out-nodes", metavar="TEXT", help='Outputs to keep: "node:0;other:1".')
@click.option("--log", default="warning", show_default=True, metavar="LEVEL", help="debug|info|warning|error|null.")
@click.option(
    "--emit",
    default="onnx",
    show_default=True,
    metavar="KIND",
    help="|".join(EMITS) + ": compressed operators, plain ONNX with zeros in place, or arrays.",
)
@click.option(
    "--container", default="npz", show_default=True, metavar="KIND", help="npz|safetensors, for --emit nvidia|ascend."
)
@click.option("--strict", is_flag=True, help="A layer with a constant weight that does not qualify is an error.")
@click.option(
    "--negative_zeros",
    "--negative-zeros",
    default="keep",
    show_default=True,
    metavar="KIND",
    help="keep|drop the signs of zeros (keep: 1 bit per weight in layers that have some).",
)
def command(
    model: str,
    framework: str,
    output: str,
    sparsity: str,
    input_shape: str | None,
    out_nodes: str | None,
    log: str,
    emit: str,
    container: str,
    strict: bool,
    negative_zeros: str,
) -> None:
    """Entry point of the subcommand."""
    set_log_level(log)
    options = Options(
        model=model,
        output=output,
        framework=whole_number("--framework", framework, _FRAMEWORKS),
        sparsity=whole_number("--sparsity", sparsity, "0 (off), 1 (2:4)"),
        emit=emit,
        container=container,
        input_shape=input_shape,
        out_nodes=out_nodes,
        strict=strict,
        negative_zeros=negative_zeros,
    )
    with progress_bar() as progress:
        report = convert(options, progress)
    if log != "null":
        click.echo(render(report))
