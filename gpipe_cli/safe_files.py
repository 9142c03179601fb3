"""Files that somebody else may have prepared: which of them are opened, and how much of them is read.

Only regular files are opened, so that no named pipe or device is waited for. Below a base directory, such as that
of a run, no symbolic link is followed, and a file with a second name is not written to: a path that begins there
also ends there. The file knows nothing of what its callers read or write.
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

__all__ = [
    "UnsafeFile",
    "open_directory",
    "open_regular",
    "parse_json",
    "read_regular",
    "writing",
]

DEEPEST = 32
"""Levels of nesting in JSON; nothing gpipe writes has ten."""
MOST_DIGITS = 40
"""Of a whole number in JSON."""
KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnsafeFile(OSError):
    """Something that is not opened, or not read, for what it is: its text says what that is."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, a failure to write to `path` becomes an error of ours: of the run where somebody prepared the path."""
    try:
        yield
    except UnsafeFile as error:
        raise RunError(f"{path}: {error}") from error
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written: {error}") from error


def open_regular(path: Path, flags: int = os.O_RDONLY, *, base: Path | None = None) -> int:
    """The descriptor of a regular file.

    base: the directory below which nothing is trusted; None for a file that the user named, whose links are followed.
    """
    if base is None:
        return _open_regular(path, flags, None)
    with open_directory(path.parent, base) as parent:
        return _open_regular(Path(path.name), flags, parent)


@contextmanager
def open_directory(path: Path, base: Path) -> Iterator[int]:
    """The descriptor of a directory at or below `base`, which itself may be a link; nothing below it may be one."""
    steps = path.relative_to(base).parts
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for step in steps:
            parent = descriptor
            try:
                descriptor = os.open(
                    step, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
                )
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    found = os.stat(step, dir_fd=parent, follow_symlinks=False)
                    raise UnsafeFile(f"'{step}' is {_kind(found)}, not a directory") from error
                raise
            finally:
                if descriptor != parent:
                    os.close(parent)
        yield descriptor
    finally:
        os.close(descriptor)


def read_regular(path: Path, most: int, *, base: Path | None = None) -> bytes:
    """What is in a regular file that has at most so many bytes."""
    with os.fdopen(open_regular(path, base=base), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UnsafeFile(f"has {size:,} bytes, and at most {most:,} are read")
        return file.read(size)


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text, ValueError for any other, and for one that no program of ours would have written.

    NaN and Infinity are taken: a measure may be one of them. A number too large for a float is not.
    """
    try:
        text = content if isinstance(content, str) else content.decode()
        value = json.loads(text, parse_int=_whole, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from error
    level = [value]
    for _ in range(DEEPEST):
        level = [child for one in level for child in _children(one)]
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
    # Emptied only after the second check: whatever took the file's place meanwhile stays as it is.
    given = flags & ~os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows else os.O_NOFOLLOW)
    descriptor = os.open(path, given, 0o666, dir_fd=parent)
    try:
        _check(os.fstat(descriptor), flags, follows)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(found: os.stat_result, flags: int, follows: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UnsafeFile(f"is {_kind(found)}, not a regular file")
    if flags & (os.O_WRONLY | os.O_RDWR) and not follows and found.st_nlink > 1:
        raise UnsafeFile("is a hard link to a file that has another name too; put a copy in its place")


def _kind(found: os.stat_result) -> str:
    return KINDS.get(stat.S_IFMT(found.st_mode), "a file")


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"it has the number {text[:MOST_DIGITS]}, which is too large")
    return number
