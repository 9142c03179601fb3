"""One writer per run directory.

The system's own lock on a file: it ends with its process, however that ends, so a dead owner needs no detective
work. A record lock (lockf) belongs to one process and is not inherited by data workers. What the file says is for
people.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpipe_cli.errors import ConfigError, ResourceError
from gpipe_cli.safe_files import open_regular, parse_json, writing

NAME = "run.lock"


@contextmanager
def only_writer(run: Path) -> Iterator[None]:
    """Inside, no other process writes to the run directory."""
    path = run / NAME
    descriptor = _locked(path)
    try:
        with writing(path):
            _write_owner(descriptor)
        yield
    finally:
        # Before it is unlocked: nobody waits for a name that is gone. One that stays is taken over by the next
        # writer, so a directory that can no longer be written to is no failure of its own, and hides none.
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _write_owner(descriptor: int) -> None:
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{json.dumps(owner)}\n".encode(), 0)


def _locked(path: Path) -> int:
    while True:
        with writing(path):
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, base=path.parent)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            owner = os.pread(descriptor, 1000, 0)
            os.close(descriptor)
            raise ConfigError(_in_use(path.parent, owner)) from error
        except OSError as error:
            os.close(descriptor)
            raise ResourceError(f"{path}: the run directory cannot be locked: {error}") from error
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # its owner removed it between our opening and our locking: try the new one


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _in_use(run: Path, owner: bytes) -> str:
    try:
        told = parse_json(owner)
        who = f"process {told['pid']} on {told['host']}, since {told['started']}"
    except (ValueError, KeyError, TypeError):
        who = "another process"
    return f"run_dir={run}: in use by {who}; wait for it, end it, or choose another run_dir"
