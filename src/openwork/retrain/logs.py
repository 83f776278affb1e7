"""Logging as AMCT's scripts ask for it, on Python's own logging."""

from __future__ import annotations

import logging
import sys

from openwork.errors import ConfigError, nearest

__all__ = ["set_logging_level"]

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_logging_level(print_level: str = "info", save_level: str = "info") -> None:
    """What openwork prints to the terminal (stderr) through the logger ``openwork``.

    Args:
        print_level: debug, info, warning or error.
        save_level: accepted for AMCT's scripts; nothing is written to disk. Attach a handler of your own to
            ``logging.getLogger("openwork")`` to keep a log.

    Raises:
        ConfigError: another level.
    """
    for name, level in (("print_level", print_level), ("save_level", save_level)):
        if not isinstance(level, str) or level.lower() not in _LEVELS:
            raise ConfigError(f"{name} is {level!r}; {nearest(str(level), _LEVELS, count=4)}")
    logger = logging.getLogger("openwork")
    logger.setLevel(_LEVELS[print_level.lower()])
    if not any(getattr(handler, "_openwork", False) for handler in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s openwork: %(message)s"))
        handler._openwork = True  # type: ignore[attr-defined]
        logger.addHandler(handler)
