"""What must not outlive its process, and a clock that stands still while this process is suspended.

Children of a killed parent and temporary folders of a killed owner must not.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from gpipe_cli.errors import ResourceError

PREFIX = "gpipe-"
LOCK = "owner.lock"
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
MAX_TICK = 1.0
"""The most seconds one tick adds to the clock: after a longer gap this process itself was suspended (Ctrl-Z)."""


@final
class AwakeClock:
    """Counts the seconds in which this process was not suspended, so that a pause of the whole run does not count."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ticked_at = time.monotonic()

    def tick(self) -> float:
        now = time.monotonic()
        self.seconds += min(now - self._ticked_at, MAX_TICK)
        self._ticked_at = now
        return self.seconds


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. A child calls this with its parent's process id.

    A killed parent cannot end its children, and a child that is stuck or waits for another never notices.
    """
    signal_with_parent(parent, signal.SIGKILL)


def signal_with_parent(parent: int, number: int) -> None:
    """Have the kernel send a signal to this process when its parent ends."""
    # The kernel watches the thread that forked us, not the whole parent: start children from a thread that lives on.
    with suppress(OSError, AttributeError):  # only Linux has prctl
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have died before prctl took effect, in which case no signal ever comes.
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """A folder that only this user can read; removed at the end, or by a later start if this process is killed."""
    folder, lock = _create(kind)
    try:
        yield folder
    finally:
        # Before the lock is released, or another start could begin to remove the folder at the same time.
        shutil.rmtree(folder, ignore_errors=True)  # the next start tries again
        os.close(lock)


def remove_abandoned_folders() -> None:
    """Remove this user's temporary folders whose owners are gone.

    An owner holds a lock on a file in its folder, and the kernel drops the lock however the process ends. A process
    id would prove nothing: it may belong to another process by now, or come from another container.
    """
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                _remove_if_abandoned(Path(entry.path))


def _create(kind: str) -> tuple[Path, int]:
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-"))
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if _try_lock(lock):
                return folder, lock
        except OSError as error:
            raise ResourceError(
                f"cannot create a temporary folder: {error}; set TMPDIR to a disk with free space"
            ) from error
        # Another gpipe found the folder in the moment before we locked it, and is removing it. Take a new one.
        os.close(lock)


def _remove_if_abandoned(folder: Path) -> None:
    # OSError: not a folder, not ours, already removed by another start, or without a lock file.
    with suppress(OSError):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return
        # O_NONBLOCK: opening a FIFO that somebody put here must not wait.
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(os.fstat(lock).st_mode) and _try_lock(lock):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _try_lock(descriptor: int) -> bool:
    # flock belongs to the open file, not to the process: a record lock would let a process take its own folders for
    # abandoned, since its second lock on the same file would succeed.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
