"""How far long work is, and how long its phases took."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["shown_progress", "timed"]


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


@contextmanager
def shown_progress(what: str, show: bool = True, total: float = 1.0) -> Iterator[Callable[[float], None] | None]:
    """A bar on the terminal, as a function that takes how far the work is; None where there is no terminal."""
    if not (show and sys.stderr.isatty()):
        yield None
        return
    words = "{task.completed:.2f} of {task.total:g}" if total != 1.0 else "{task.percentage:.0f} %"
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn(words), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda value: bar.update(task, completed=min(value, total))
