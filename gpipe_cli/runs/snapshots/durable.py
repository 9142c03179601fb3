"""Files and directories that exist whole or not at all, even if the machine stops while they are written.

Every call that changes the disk goes through `os`, so that tests can end the process at each of them. All calls are
relative to the descriptor of the directory they change; `base` is the directory below which no link is followed.
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
from typing import final

from gpipe_cli.safe_files import open_directory

Content = Iterable[bytes | bytearray | memoryview]
CHUNK = 8 * 2**20
"""Bytes written or read at a time."""
UNFINISHED = ".tmp"
"""The suffix of what is half-written: the next writer removes it, and no one reads it."""


@final
@dataclass(frozen=True)
class FileDigest:
    """What tells a file from a damaged one."""

    size: int
    sha256: str


def begin_directory(target: Path, *, base: Path) -> None:
    """Make the directory that `commit_directory` will give the name of the target."""
    temporary = target.name + UNFINISHED
    with open_directory(target.parent, base) as parent:
        # A killed process may have left it. The name is fixed, so leftovers do not pile up.
        _remove(temporary, parent)
        os.mkdir(temporary, dir_fd=parent)


def write_files(
    target: Path, files: Mapping[str, Content], on_chunk: Callable[[], None], *, base: Path
) -> dict[str, FileDigest]:
    """Write files durably into a directory that was begun, also by several processes at once.

    on_chunk: called before each chunk is written; an exception from it ends the writing.
    """
    with open_directory(target.with_name(target.name + UNFINISHED), base) as folder:
        digests = {name: _write(name, content, folder, on_chunk) for name, content in files.items()}
        # Only now: the disk writes the first files back while we fill the later ones.
        for name in files:
            _sync(name, folder)
        os.fsync(folder)  # of a directory, fsync makes the names in it durable
    return digests


def commit_directory(target: Path, *, base: Path) -> None:
    """Give a directory whose files are durable its name."""
    temporary = target.name + UNFINISHED
    with open_directory(target.parent, base) as parent:
        # The data is on the disk before the rename, or a power cut could leave the final name on empty files.
        # Onto a snapshot that exists the rename fails, because that directory is not empty.
        os.rename(temporary, target.name, src_dir_fd=parent, dst_dir_fd=parent)
        # The caller may now remove older snapshots: a power cut must not undo the rename alone.
        os.fsync(parent)


def discard_directory(target: Path, *, base: Path) -> None:
    """Remove a directory that was begun, if it is there."""
    remove(target.with_name(target.name + UNFINISHED), base)


def sizes_in(target: Path, names: Iterable[str], *, base: Path) -> dict[str, int | None]:
    """The sizes of files in a directory that was begun, as this process sees them; None for a file that it lacks."""
    sizes: dict[str, int | None] = {}
    with open_directory(target.with_name(target.name + UNFINISHED), base) as folder:
        for name in names:
            try:
                sizes[name] = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
            except FileNotFoundError:
                sizes[name] = None
    return sizes


def write_file(target: Path, content: Content, *, replace: bool = True, base: Path | None = None) -> None:
    """Write or replace a file: a reader sees the old content or the new one, never a part.

    base: by default the directory of the file.
    """
    temporary = target.name + UNFINISHED
    with open_directory(target.parent, base or target.parent) as parent:
        _remove(temporary, parent)
        try:
            _write(temporary, content, parent, lambda: None)
            _sync(temporary, parent)
            if replace:
                os.rename(temporary, target.name, src_dir_fd=parent, dst_dir_fd=parent)
            else:  # unlike a rename, a link fails if the name exists
                os.link(temporary, target.name, src_dir_fd=parent, dst_dir_fd=parent)
            os.fsync(parent)
        finally:
            # A rename leaves nothing to remove; a link, or a failure, leaves the temporary name.
            _remove(temporary, parent)


def remove(path: Path, base: Path) -> None:
    """Remove a directory and everything in it. Of a link, remove only the link itself."""
    with open_directory(path.parent, base) as parent:
        _remove(path.name, parent)


def remove_atomically(path: Path, base: Path) -> None:
    """Remove a directory so that it never exists half-removed under its own name."""
    doomed = path.name + UNFINISHED
    with open_directory(path.parent, base) as parent:
        _remove(doomed, parent)
        os.rename(path.name, doomed, src_dir_fd=parent, dst_dir_fd=parent)
        # Durable before the removal begins: after a power cut, what is half-removed has a name that no reader opens.
        os.fsync(parent)
        _remove(doomed, parent)


def _remove(name: str, parent: int) -> None:
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(name, dir_fd=parent)
    else:
        os.unlink(name, dir_fd=parent)


def _write(name: str, content: Content, parent: int, on_chunk: Callable[[], None]) -> FileDigest:
    digest, size = hashlib.sha256(), 0
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # O_EXCL also refuses a link under that name
    descriptor = os.open(name, new, 0o666, dir_fd=parent)
    try:
        # Hashing is about as slow as a good disk, and both release the GIL: do them side by side. A single thread
        # hashes the chunks in the order of writing, and leaving the block waits for the last of them.
        with ThreadPoolExecutor(1, thread_name_prefix="gpipe-hash") as hashing:
            for part in content:
                view = memoryview(part)
                for begin in range(0, len(view), CHUNK):
                    chunk = view[begin : begin + CHUNK]
                    on_chunk()
                    hashing.submit(digest.update, chunk)
                    size += len(chunk)
                    while chunk:  # a write may take a part only
                        chunk = chunk[os.write(descriptor, chunk) :]
    finally:
        os.close(descriptor)
    return FileDigest(size, digest.hexdigest())


def _sync(name: str, parent: int) -> None:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
