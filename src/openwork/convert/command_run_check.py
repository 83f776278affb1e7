"""``openwork run-check``: do the dense and the compressed model give the same?"""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import click
import numpy as np

from openwork.convert.console import OneLineCommand, whole_number
from openwork.convert.runcheck import run_check
from openwork.errors import FileError, ModelError

__all__ = ["command"]


@click.command(
    "run-check",
    cls=OneLineCommand,
    help="Feed two models the same inputs in onnxruntime; say whether outputs are equal, load time, latency.\n\n"
    "\b\nExample:\n  openwork run-check model.onnx out/model.onnx\n\n"
    "Exit code 0 when all outputs are equal bit for bit, else 1.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("dense")
@click.argument("sparse")
@click.option("--input", "inputs", multiple=True, metavar="FILE", help="Inputs by name in an .npz file; repeatable.")
@click.option("--input_shape", "--input-shape", metavar="TEXT", help='Sizes of dynamic inputs: "x:1,3,224,224".')
@click.option("--random", "count", default="3", show_default=True, metavar="N", help="Number of random inputs.")
@click.option("--repeats", default="10", show_default=True, metavar="N", help="Timed runs of each model.")
@click.option("--seed", default="0", show_default=True, metavar="N", help="Seed of the random inputs.")
@click.option("--threads", default="1", show_default=True, metavar="N", help="Threads of onnxruntime.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    dense: str,
    sparse: str,
    inputs: tuple[str, ...],
    input_shape: str | None,
    count: str,
    repeats: str,
    seed: str,
    threads: str,
    as_json: bool,
) -> None:
    """Entry point of the subcommand."""
    check = run_check(
        dense,
        sparse,
        [_read(path) for path in inputs],
        input_shape,
        random=whole_number("--random", count, "a whole number"),
        repeats=whole_number("--repeats", repeats, "a whole number"),
        seed=abs(whole_number("--seed", seed, "a whole number")),
        threads=max(1, whole_number("--threads", threads, "a whole number")),
    )
    if as_json:
        click.echo(json.dumps({**asdict(check), "bit_equal": check.bit_equal}, indent=1))
    else:
        for output in check.outputs:
            if output.bit_equal:
                verdict = "equal bit for bit"
            elif output.equal:
                verdict = "equal as numbers (signs of zeros or NaN bits differ)"
            else:
                verdict = f"different by up to {output.largest_difference:.3g}"
            click.echo(f"output {output.name} {output.shape}: {verdict}")
        for what, (first, second) in (("load", check.load_s), ("latency", check.latency_s)):
            click.echo(f"{what}: {first * 1e3:.3g} ms -> {second * 1e3:.3g} ms ({second / max(first, 1e-9):.2f}x)")
        click.echo(f"files: {check.file_bytes[0]:,} -> {check.file_bytes[1]:,} bytes; {check.inputs} inputs")
    if not check.bit_equal:
        raise ModelError(f"{dense} and {sparse} give different outputs")


def _read(path: str) -> dict[str, np.ndarray]:
    if not os.path.isfile(path):
        raise FileError(f"--input {path}: no such file")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, AttributeError) as error:
        raise FileError(f"--input {path}: not an .npz file of arrays: {' '.join(str(error).split())}") from error
