"""Temporary folders that do not outlive their owner for long: what a killed process leaves, the next start removes.

Its owner holds a lock on a file in the folder, which ends with the process, however that ends. So an owner is gone if
its file can be locked; no process id is guessed at, which may be another's by now or be counted elsewhere.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpipe_cli.errors import ResourceError

__all__ = ["owned_folder", "remove_abandoned"]

PREFIX = "gpipe-"
LOCK = "owner.lock"


@contextmanager
def owned_folder(kind: str) -> Iterator[Path]:
    """A folder in the system's temporary one, readable by nobody else; removed at the end."""
    folder, lock = _made(kind)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what cannot be removed is the next start's to try
        os.close(lock)


def remove_abandoned() -> None:
    """Remove the folders of this user whose owners are gone. Links are not followed, nothing else is touched."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                _remove_if_abandoned(Path(entry.path))


def _made(kind: str) -> tuple[Path, int]:
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if _is_free(lock):
                return folder, lock
        except OSError as error:
            raise ResourceError(
                f"no temporary folder can be made: {error}; set TMPDIR to a disk with room"
            ) from error
        os.close(lock)  # another start has found it just before it was locked, and removes it


def _remove_if_abandoned(folder: Path) -> None:
    with suppress(OSError):  # not a folder, not ours, removed by another start, or without an owner's file
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(os.fstat(lock).st_mode) and _is_free(lock):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _is_free(lock: int) -> bool:
    """Whether nobody holds it; from now on this process does."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
