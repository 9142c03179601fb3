"""Files and directories that are there whole or not at all, even if the machine stops in between.

Decides the order of write, fsync and rename. It knows nothing of what is written. Every call that changes the
disk goes through `os`, so that tests can end the process at each of them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

Content = Iterable[bytes | bytearray | memoryview]
CHUNK = 8 * 2**20
"""Bytes between two looks at whether to go on."""
UNFINISHED = ".tmp"
"""What the name of something half-written ends in: swept away by the next writer, never read."""


@dataclass(frozen=True)
class FileFacts:
    """What tells a file from a damaged one."""

    size: int
    sha256: str


def write_directory(
    target: Path,
    files: Mapping[str, Content],
    last: Callable[[dict[str, FileFacts]], tuple[str, bytes]],
    between: Callable[[], None],
) -> None:
    """Make a directory of files; `last` is told of all of them and gives name and content of the last one.

    between: called every few megabytes; what it raises ends the writing. Nothing is left of a failed attempt.
    """
    temporary = target.with_name(target.name + UNFINISHED)
    remove(temporary)
    try:
        os.mkdir(temporary)  # noqa: PTH102 - see the top of the file
        facts = {name: _write(temporary / name, content, between) for name, content in files.items()}
        for name in files:  # after all are written: meanwhile the disk has been busy with the first
            _sync(temporary / name)
        name, content = last(facts)
        _write(temporary / name, [content], between)
        _sync(temporary / name)
        _sync(temporary)
        os.rename(temporary, target)  # noqa: PTH104
        _sync(target.parent)
    except BaseException:
        remove(temporary)
        raise


def write_file(target: Path, content: Content, *, replace: bool = True) -> None:
    """Make a file, or put another in its place: whoever looks sees the old or the new, never half of one."""
    temporary = target.with_name(target.name + UNFINISHED)
    try:
        _write(temporary, content, _go_on)
        _sync(temporary)
        if replace:
            os.rename(temporary, target)  # noqa: PTH104
        else:
            os.link(temporary, target)  # unlike a rename, it fails where there is one already
        _sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a directory with all in it; a link is removed itself, never what it leads to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def retire(path: Path) -> None:
    """Remove a directory that must not be seen half-removed."""
    doomed = path.with_name(path.name + UNFINISHED)
    remove(doomed)
    os.rename(path, doomed)  # noqa: PTH104
    _sync(path.parent)
    remove(doomed)


def _go_on() -> None:
    pass


def _write(path: Path, content: Content, between: Callable[[], None]) -> FileFacts:
    """Hashed in a thread of its own: hashing is about as slow as a good disk, and they need not take turns."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="gpipe-hash") as hashing:
            for piece in _pieces(content):
                between()
                hashing.submit(digest.update, piece)
                _write_all(descriptor, piece)
                size += len(piece)
    finally:
        os.close(descriptor)
    return FileFacts(size, digest.hexdigest())


def _pieces(content: Content) -> Iterable[memoryview]:
    for part in content:
        view = memoryview(part)
        yield from (view[begin : begin + CHUNK] for begin in range(0, len(view), CHUNK))


def _write_all(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]


def _sync(path: Path) -> None:
    """On the disk itself, not only in the system's memory; of a directory: the names in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
