"""Files are read and written whole: nobody sees half a file, an interrupted write keeps the old one."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openwork.errors import FileError

__all__ = [
    "atomic_path",
    "check_paths",
    "check_writable",
    "path_text",
    "read_bytes",
    "read_text",
    "write_bytes",
    "write_text",
]


def path_text(path: Any, what: str, empty: bool = False) -> str:
    """A path as text, after a check that it can be one.

    Args:
        path: what the caller gave.
        what: the argument that it was given for, for messages.
        empty: whether the empty path (the working directory) will do.

    Raises:
        FileError: neither text nor an ``os.PathLike`` of text, empty, too long, or with characters that no file's name
            can have.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str):
        shown = repr(path)
        if "\n" in shown or len(shown) > 80:
            shown = f"a {type(path).__name__}"
        raise FileError(f"{what} is {shown}; a path is needed, as str or os.PathLike")
    if not text and not empty:
        raise FileError(f"{what} is {text!r}; the path of a file is needed")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise FileError(f"{what} is {text!r}; a name without characters that no file can have is needed")
    try:
        os.lstat(encoded)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise FileError(f"{what} is {text!r}; a shorter name is needed, as file systems hold") from error
    return text


def check_paths(**paths: Any) -> None:
    """Raise unless each of these arguments is a path; see `path_text`.

    Raises:
        FileError: one is none; it is named.
    """
    for name, path in paths.items():
        path_text(path, name)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path in the folder of `path`; on success flush it to disk and rename it to `path`.

    Missing folders are made. On any exception (also KeyboardInterrupt) the temporary file is removed and
    whatever stood at `path` stays as it was.

    Raises:
        FileError: no path, the folder cannot be made or written, or the disk is full.
    """
    target = Path(path_text(path, "path"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=target.suffix, dir=target.parent)
    except OSError as error:
        raise FileError(f"{target}: cannot be written: {error.strerror or error}") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        # mkstemp makes files private; give the result the mode that open() would have given.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~mask)
        os.replace(temporary, target)
    except OSError as error:
        raise FileError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` as UTF-8, whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def read_bytes(path: str | os.PathLike[str], what: str, limit: int) -> bytes:
    """Read a file.

    Args:
        path: the file.
        what: what the file is to the user ("config file"), for messages.
        limit: size in bytes above which the file is refused unread.

    Raises:
        FileError: no path, missing, a folder, unreadable, or larger than `limit`.
    """
    target = Path(path_text(path, what))
    if target.is_dir():
        raise FileError(f"{what} {target} is a folder; a file is needed")
    try:
        size = target.stat().st_size
        if size > limit:
            raise FileError(f"{what} {target} has {size:,} bytes; at most {limit:,} are read")
        return target.read_bytes()
    except FileNotFoundError as error:
        raise FileError(f"{what} {target} does not exist") from error
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{what} {target} cannot be read: {error.strerror or error}") from error


def read_text(path: str | os.PathLike[str], what: str, limit: int = 64 << 20) -> str:
    """Read a UTF-8 text file; otherwise as `read_bytes`.

    Raises:
        FileError: missing, a folder, unreadable, larger than `limit`, or not UTF-8.
    """
    try:
        return read_bytes(path, what, limit).decode("utf-8-sig")  # some editors put a mark first
    except UnicodeDecodeError as error:
        raise FileError(f"{what} {Path(path)} is not UTF-8 text (byte {error.start}: {error.reason})") from error


def check_writable(path: str | os.PathLike[str], what: str, config: str | os.PathLike[str] | None = None) -> None:
    """Raise now if `path` could not be written later. Folders are made, nothing else is left behind.

    Raises:
        FileError: `path` is no path, a folder, or `config`, which is read, or its folder cannot be made or written.
    """
    target = Path(path_text(path, what))
    if config is not None and os.path.realpath(target) == os.path.realpath(config):
        raise FileError(f"{what} {target} is the config file itself; give another file")
    if target.is_dir():
        raise FileError(f"{what} {target} is a folder; a file name is needed")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise FileError(f"{what} {target} cannot be written: {error.strerror or error}") from error
