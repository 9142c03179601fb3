"""Opens and reads files that somebody else may have prepared, and keeps secrets out of the files that gpipe writes.

Only regular files are opened, so that gpipe never waits for a named pipe or a device. Below a base directory, such as
a run directory, no symbolic link is followed and no file with a second hard link is written to, so that a path which
starts there also ends there.

A value from `${oc.env:NAME}` may be a secret. Saved configurations keep the reference. Messages contain the value, so
code that writes one to a file passes it through `redacted`, which puts the reference back. The terminal shows the
value.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ResourceError, RunError

DEEPEST = 32
"""Levels of nesting in JSON; nothing that gpipe writes has ten."""
MAX_DIGITS = 40
"""Digits of a whole number in JSON."""
KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
SHORTEST_SECRET = 4
"""In characters. Replacing every `1` or `cpu` would make a log unreadable and hide nothing."""
_references: dict[str, str] = {}


class UnsafeFile(OSError):
    """A file that gpipe does not open or read; the message says why."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report a failure to write to `path` as ResourceError, or as RunError if somebody prepared the path."""
    try:
        yield
    except UnsafeFile as error:
        raise RunError(f"{path}: {error}") from error
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written: {error}") from error


def open_regular(path: Path, flags: int = os.O_RDONLY, *, base: Path | None = None) -> int:
    """The descriptor of a regular file.

    base: the directory below which no link is followed; None for a file that the user named, whose links are followed.
    """
    if base is None:
        return _open_regular(path, flags, None)
    with open_directory(path.parent, base) as parent:
        return _open_regular(Path(path.name), flags, parent)


@contextmanager
def open_directory(path: Path, base: Path) -> Iterator[int]:
    """The descriptor of a directory at or below `base`. `base` may be a symbolic link; nothing below it may be."""
    steps = path.relative_to(base).parts
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # One component at a time, each relative to its parent's descriptor: O_NOFOLLOW only covers the last component
        # of a path.
        for step in steps:
            parent = descriptor
            try:
                descriptor = os.open(
                    step, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
                )
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    status = os.stat(step, dir_fd=parent, follow_symlinks=False)
                    raise UnsafeFile(f"'{step}' is {_kind(status)}, not a directory") from error
                raise
            finally:
                if descriptor != parent:
                    os.close(parent)
        yield descriptor
    finally:
        os.close(descriptor)


def read_regular(path: Path, most: int, *, base: Path | None = None) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    with os.fdopen(open_regular(path, base=base), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UnsafeFile(f"has {size:,} bytes; gpipe reads at most {most:,}")
        # Not to the end: a file that grows meanwhile stays within the limit.
        return file.read(size)


def user_cache(name: str) -> Path:
    """A folder of the user's own cache; the XDG specification says to ignore a relative path."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (cache_home if cache_home.is_absolute() else Path.home() / ".cache") / "gpipe" / name


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text; ValueError if it is malformed, nested too deeply or has absurd numbers.

    NaN and Infinity are accepted, because a metric may be one of them. A number too large for a float is not.
    """
    try:
        text = content if isinstance(content, str) else content.decode()
        value = json.loads(text, parse_int=_whole, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from error
    # Level by level instead of recursively, so that the check itself cannot exhaust the stack.
    level = [value]
    for _ in range(DEEPEST):
        level = [child for node in level for child in _children(node)]
        if not level:
            return value
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _open_regular(path: Path, flags: int, parent: int | None) -> int:
    follows = parent is None
    try:
        _check(os.stat(path, dir_fd=parent, follow_symlinks=follows), flags, follows)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    # Truncate only after the second check: the file may have been exchanged since the first. If it now is a FIFO,
    # O_NONBLOCK keeps the open from waiting for its other end; regular files ignore the flag.
    safe_flags = flags & ~os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows else os.O_NOFOLLOW)
    descriptor = os.open(path, safe_flags, 0o666, dir_fd=parent)
    try:
        _check(os.fstat(descriptor), flags, follows)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(status: os.stat_result, flags: int, follows: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFile(f"is {_kind(status)}, not a regular file")
    if flags & (os.O_WRONLY | os.O_RDWR) and not follows and status.st_nlink > 1:
        raise UnsafeFile("is a hard link to a file that has another name too; replace it by a copy")


def _kind(status: os.stat_result) -> str:
    return KINDS.get(stat.S_IFMT(status.st_mode), "a file")


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"it has the number {text[:MAX_DIGITS]}, which is too large")
    return number


def remember(name: str, value: object) -> None:
    """Hide the value of this environment variable from now on, unless it is a number or very short."""
    if isinstance(value, str) and len(value) >= SHORTEST_SECRET and not _is_number(value):
        _references[value] = f"${{oc.env:{name}}}"


def redacted(text: str) -> str:
    for value in sorted(_references, key=len, reverse=True):
        text = text.replace(value, _references[value])
    return text


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
