"""A progress bar for each long step, on stderr, only when that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["Advance", "progress"]

# Called with the number of parts of the step that are done.
Advance = Callable[[int], None]


@contextlib.contextmanager
def progress(step: str, total: int) -> Iterator[Advance]:
    """Show how far a step is.

    Args:
        step: what is done.
        total: number of parts.

    Yields:
        A function that takes the number of parts done; it does nothing when stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(step, total=total)
        yield lambda done: bar.update(task, completed=done)
