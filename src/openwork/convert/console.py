"""What the converter's commands share: one-line errors, the progress bar, the log level."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import click

from openwork.convert.job import Progress
from openwork.errors import ConfigError, nearest

__all__ = ["LOG_LEVELS", "OneLineCommand", "progress_bar", "set_log_level", "whole_number"]

LOG_LEVELS = ("debug", "info", "warning", "error", "null")


class OneLineCommand(click.Command):
    """A command whose usage errors are one line like all others, without the help text."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.NoSuchOption as error:
            known = [name for parameter in self.params for name in parameter.opts if name.startswith("--")]
            raise ConfigError(f"{error.option_name}: no such option; {nearest(error.option_name, known)}") from error
        except click.UsageError as error:
            raise ConfigError(f"{info_name}: {' '.join(error.format_message().split())}") from error


def whole_number(option: str, text: str, allowed: str) -> int:
    """The number that an option was given.

    Raises:
        ConfigError: no whole number.
    """
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{option} {text!r}: allowed: {allowed}") from None


def set_log_level(level: str) -> None:
    """Show messages of the converter on stderr from this level on.

    Raises:
        ConfigError: an unknown level.
    """
    if level not in LOG_LEVELS:
        raise ConfigError(f"--log {level!r}: allowed: {', '.join(LOG_LEVELS)}")
    logger = logging.getLogger("openwork.convert")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    if level == "null":
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("openwork: %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A progress bar when stderr is a terminal, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=max(1, total))
            bar.update(tasks[what], completed=done, total=max(1, total))

        yield advance
