"""Files and directories that are there whole or not at all, even if the machine stops in between.

Decides the order of write, fsync and rename. It knows nothing of what is written. Every call that changes the
disk goes through `os`, so that tests can end the process at each of them. All are relative to the descriptor of the
directory they change; `base` is the directory below which no link is followed on the way to it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpipe_cli.safe_files import open_directory

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
    *,
    base: Path,
) -> None:
    """Make a directory of files; `last` is told of all of them and gives name and content of the last one.

    between: called every few megabytes; what it raises ends the writing. Nothing is left of a failed attempt.
    """
    temporary = target.name + UNFINISHED
    with open_directory(target.parent, base) as parent:
        _remove(temporary, parent)
        try:
            os.mkdir(temporary, dir_fd=parent)
            with open_directory(target.parent / temporary, base) as made:
                facts = {name: _write(name, content, made, between) for name, content in files.items()}
                for name in files:  # after all are written: meanwhile the disk has been busy with the first
                    _sync(name, made)
                name, content = last(facts)
                _write(name, [content], made, between)
                _sync(name, made)
                os.fsync(made)
            os.rename(temporary, target.name, src_dir_fd=parent, dst_dir_fd=parent)
            os.fsync(parent)
        except BaseException:
            _remove(temporary, parent)
            raise


def write_file(target: Path, content: Content, *, replace: bool = True, base: Path | None = None) -> None:
    """Make a file, or put another in its place: whoever looks sees the old or the new, never half of one.

    base: where it is not the directory of the file.
    """
    temporary = target.name + UNFINISHED
    with open_directory(target.parent, base or target.parent) as parent:
        _remove(temporary, parent)
        try:
            _write(temporary, content, parent, _go_on)
            _sync(temporary, parent)
            if replace:
                os.rename(temporary, target.name, src_dir_fd=parent, dst_dir_fd=parent)
            else:  # unlike a rename, it fails where there is one already
                os.link(temporary, target.name, src_dir_fd=parent, dst_dir_fd=parent)
            os.fsync(parent)
        finally:
            _remove(temporary, parent)


def remove(path: Path, base: Path) -> None:
    """Remove a directory with all in it; a link is removed itself, never what it leads to."""
    with open_directory(path.parent, base) as parent:
        _remove(path.name, parent)


def retire(path: Path, base: Path) -> None:
    """Remove a directory that must not be seen half-removed."""
    doomed = path.name + UNFINISHED
    with open_directory(path.parent, base) as parent:
        _remove(doomed, parent)
        os.rename(path.name, doomed, src_dir_fd=parent, dst_dir_fd=parent)
        os.fsync(parent)
        _remove(doomed, parent)


def _remove(name: str, parent: int) -> None:
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode):
        shutil.rmtree(name, dir_fd=parent)
    else:
        os.unlink(name, dir_fd=parent)


def _go_on() -> None:
    pass


def _write(name: str, content: Content, parent: int, between: Callable[[], None]) -> FileFacts:
    """Hashed in a thread of its own: hashing is about as slow as a good disk, and they need not take turns."""
    digest, size = hashlib.sha256(), 0
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # which no link can be
    descriptor = os.open(name, new, 0o666, dir_fd=parent)
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


def _sync(name: str, parent: int) -> None:
    """On the disk itself, not only in the system's memory; of a directory, fsync means the names in it."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
