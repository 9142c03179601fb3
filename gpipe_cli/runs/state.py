"""The state of a training run, read from its directory: who holds its lock, and what its last process left there.

    running   a process holds the lock
    finished  it wrote its result
    stopped   it was asked to stop; it can be resumed
    failed    an error ended it
    dead      none of these: its process was killed, or the machine lost power

A run of several ranks has one directory, which rank 0 locks, so it has one state. Imports no torch.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from gpipe_cli.errors import RunError
from gpipe_cli.safe_files import open_regular, parse_json, read_regular

LOCK_NAME = "run.lock"
OUTCOME = "outcome.json"
"""Why a run ended without a result; a resumed run removes it."""
RESULTS = ("summary.json", "profile.json")
RUN_FILES = ("config.yaml", "launch.json", "metrics.jsonl", LOCK_NAME, OUTCOME, *RESULTS)
"""A directory with none of these is not a run."""
MAX_OUTCOME_BYTES = 2**20
FLOCK = struct.Struct("hhqqi")
"""C's struct flock on Linux: type, whence, start, length, process."""

own_locks: set[tuple[int, int]] = set()
"""Device and inode of each lock file that this process has locked: closing a second descriptor of such a file would
release the lock, so it must not be opened again."""


@final
@dataclass(frozen=True)
class RunState:
    name: Literal["running", "finished", "stopped", "failed", "dead"]
    reason: str = ""
    """Why it stopped or failed, in one line."""


def run_state(directory: Path) -> RunState | None:
    """The state of the run in a directory; None if there is no run in it. RunError if its files cannot be trusted."""
    try:
        if not any(os.path.lexists(directory / name) for name in RUN_FILES):
            return None
        own = _is_own_lock(directory / LOCK_NAME)
        if not own and _is_locked(directory):
            return RunState("running")
        if any((directory / name).is_file() for name in RESULTS):
            return RunState("finished")
        outcome = _read_outcome(directory)
    except (OSError, ValueError) as error:
        raise RunError(f"{directory}: its state cannot be read: {error}") from error
    # A process that still holds the lock when it has written how the run ended is about to release it.
    return outcome or RunState("running" if own else "dead")


def _is_own_lock(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) in own_locks


def _is_locked(directory: Path) -> bool:
    """Whether another process holds the lock: asks the system without taking the lock, so no run has to wait."""
    try:
        descriptor = open_regular(directory / LOCK_NAME, base=directory)
    except FileNotFoundError:
        return False
    try:
        question = FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        answer = FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    finally:
        os.close(descriptor)
    return bool(answer[0] != fcntl.F_UNLCK)


def _read_outcome(directory: Path) -> RunState | None:
    try:
        content: Any = parse_json(read_regular(directory / OUTCOME, MAX_OUTCOME_BYTES, base=directory))
    except FileNotFoundError:
        return None
    match content:
        case {"state": "stopped" | "failed" as name, "reason": str(reason)}:
            return RunState(name, reason)
    raise ValueError(f"{OUTCOME} is damaged")
