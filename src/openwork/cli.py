"""The command `openwork`. Each subcommand is imported when it is called, so that --help is instant."""

from __future__ import annotations

import sys
from importlib import import_module

import click

from openwork import __version__
from openwork.errors import OpenworkError

__all__ = ["main"]

# Subcommand -> module that defines it as `command`; imported on use.
_COMMANDS: dict[str, str] = {
    "analyze": "openwork.torch.command",
    "convert": "openwork.convert.command",
    "decompress": "openwork.convert.command_decompress",
    "demo": "openwork.demo.command",
    "demo-tf": "openwork.demo_tensorflow.command",
    "inspect": "openwork.convert.command_inspect",
    "run-check": "openwork.convert.command_run_check",
}

# Lines of --help: asking the commands for theirs would import every framework.
_SUMMARIES: dict[str, str] = {
    "analyze": "Show what can be pruned in a model, and what cannot and why.",
    "convert": "Find 2:4 weights in a model file and store them compressed.",
    "decompress": "Undo convert: the original weights, bit for bit.",
    "demo": "Train, prune, retrain, export and compare a small network.",
    "demo-tf": "The same for a TensorFlow graph, the channels found by a search.",
    "inspect": "Say which layers of a model file have 2:4 weights, or why not.",
    "run-check": "Run two model files on the same inputs and compare the results.",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        try:
            module = import_module(_COMMANDS[cmd_name])
        except ModuleNotFoundError as error:
            extra = _COMMANDS[cmd_name].split(".")[1].replace("convert", "onnx")
            raise OpenworkError(
                f"{cmd_name} needs {error.name}, which is not installed; "
                f'install it with: pip install "openwork[{extra}]"'
            ) from error
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _SUMMARIES.get(name, "")) for name in self.list_commands(ctx)])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="openwork")
def _cli() -> None:
    """Structured sparsity for neural networks, on any hardware."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; an expected error is one line on stderr and exit code 1 (or the error's own)."""
    try:
        code = _cli.main(args=arguments, prog_name="openwork", standalone_mode=False)
        if isinstance(code, int) and code:
            sys.exit(code)
    except click.ClickException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "openwork")
        click.echo(f"openwork: error: {' '.join(error.format_message().split())} (see {command} --help)", err=True)
        sys.exit(1)
    except click.Abort:
        click.echo("openwork: interrupted", err=True)
        sys.exit(130)
    except OpenworkError as error:
        click.echo(f"openwork: error: {' '.join(str(error).splitlines())}", err=True)
        sys.exit(getattr(error, "exit_code", 1))
