"""``openwork demo-tf``."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import click

from openwork.errors import FileError, OpenworkError
from openwork.files import check_writable

__all__ = ["check_installed", "command"]

# Module -> the name it is installed by.
_NEEDED = {
    "tensorflow": "tensorflow",
    "tf2onnx": "tf2onnx",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "sklearn": "scikit-learn",
}


def check_installed() -> None:
    """Raise unless everything that the demo imports is there.

    Raises:
        OpenworkError: names what is missing and the command that installs it.
    """
    missing = [name for module, name in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise OpenworkError(
            f"the demo needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            'install with: pip install "openwork[demo-tf]"'
        )


@click.command("demo-tf", short_help="The demo with a TensorFlow graph, the channels found by a search.")
@click.option("--output", default="openwork-demo-tf", metavar="FOLDER", show_default=True,
              help="Folder for all files of the demo; nothing else is written.")  # fmt: skip
@click.option("--epochs", default=6, show_default=True, type=click.IntRange(min=1),
              help="Passes over the training images, before pruning and again after it.")  # fmt: skip
@click.option("--rounds", default=200, show_default=True, type=click.IntRange(min=1),
              help="How often each ONNX file is timed on one image; a quarter as often on 64.")  # fmt: skip
def command(output: str, epochs: int, rounds: int) -> None:
    """Train ResNet-20 on scikit-learn's digits in graph mode, search channels for half of the operations, retrain
    under masks, cut, convert to ONNX and compare in onnxruntime. Takes a few minutes and no network."""
    check_installed()
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise FileError(f"--output {folder} is a file; a folder is needed")
    check_writable(folder / "results.json", "--output")

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's notes on how it was built

    from rich.console import Console

    from openwork.demo.table import comparison
    from openwork.demo_tensorflow.flow import COMPRESSION, run_demo

    results = run_demo(folder, epochs, rounds, click.echo)
    Console().print(comparison(results, f"TensorFlow, {COMPRESSION:g} times fewer operations"))
    click.echo("The pruned network has been trained twice as long: before and after it was pruned.")
    click.echo(f"Latency: onnxruntime, one thread, medians of runs in turn. All files are in {folder}/")
