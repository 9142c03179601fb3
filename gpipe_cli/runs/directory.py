"""The directory of a run: created once, written by one process at a time, never overwritten. How an attempt to run ends
is recorded here, in outcome.json; an attempt may end before it needs torch.

config.yaml paths.json overrides.yaml env.json launch.json    runs/launch_record
train.log logger.json                                         runs/recorder, loggers/protocol
metrics.jsonl                                                 training/metrics
snapshots/                                                    runs/snapshots/manager
summary.json report.html                                      runs/summary, commands/report
schedule.csv                                                  build/custom_schedule
trace.json                                                    commands/profile
check.json                                                    commands/check
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigError, GpipeError, ResourceError, Stopped, exit_code
from gpipe_cli.report.formatting import describe
from gpipe_cli.runs.reader import LOCK_NAME, OUTCOME, RESULTS, has_settings, own_locks
from gpipe_cli.runs.snapshots.durable import UNFINISHED, write_file
from gpipe_cli.runs.snapshots.manifest import is_snapshot, run_directory_of
from gpipe_cli.safe_files import open_regular, parse_json, redacted, writing
from gpipe_cli.training.signals import as_stopped

MAX_NAME_LENGTH = 80
LEFTOVERS = (LOCK_NAME, f"config.yaml{UNFINISHED}", ".hydra", "gpipe.log")
"""What a run leaves that was killed before it had a configuration, and what Hydra writes before a run if told to."""


def check_run_dir(run_dir: str | None) -> None:
    """Reject a directory that cannot be used, before anything expensive is done."""
    check_directory_name(run_dir)
    path = planned_run_directory(run_dir)
    try:
        if run_dir is not None and path.is_dir() and {entry.name for entry in path.iterdir()} - {*LEFTOVERS}:
            hint = (
                f"resume={path} continues the run in it, or choose another one"
                if has_settings(path)
                else "choose another one, or remove it"
            )
            raise ConfigError(f"run_dir={path}: the directory exists and is not empty; {hint}")
        # The directory need not exist yet: its nearest existing ancestor decides whether it can be created.
        existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    except OSError as error:  # a name that is too long, a folder without read permission
        raise ConfigError(f"run_dir={path}: the directory cannot be used: {error}") from error
    if not existing.is_dir():
        raise ConfigError(f"run_dir={path}: {existing} is a file; choose another directory")
    if not os.access(existing, os.W_OK):
        raise ResourceError(f"run_dir={path}: {existing} is not writable")


def check_directory_name(run_dir: str | None) -> None:
    if run_dir is not None and (not run_dir or "\0" in run_dir):
        raise ConfigError(
            f"run_dir={run_dir}: give the name of a directory, or null for runs/<command>/<model>/<time>"
        )


def make_run_directory(run_dir: str | None, command: str, name: str) -> Path:
    """The given directory, else a new one named by the time."""
    check_run_dir(run_dir)
    try:
        if run_dir is None:
            return _make_timestamped(Path("runs") / command / _path_component(name))
        path = Path(run_dir)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"run_dir: the directory cannot be created: {error}") from error
    return path


def planned_run_directory(run_dir: str | None) -> Path:
    """Where a run will be, or the folder it will be in: the rest of its name depends on when it is created."""
    return Path("runs" if run_dir is None else run_dir)


def resumed_directory(resume: str | None, run_dir: str | None) -> Path | None:
    """The run that `resume` names, or that of `run_dir` if there is one; it need not exist. None for a new run."""
    if resume is None:
        return None
    if resume != "auto":
        return run_directory_of(Path(resume)) if is_snapshot(Path(resume)) else Path(resume)
    assert run_dir is not None, "the configuration was checked"
    path = Path(run_dir)
    return path if has_settings(path) else None


def _make_timestamped(base: Path) -> Path:
    """A new directory: `mkdir` decides between runs that start in the same second."""
    base.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in itertools.count(1):
        path = base / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable: the loop above has no end")


def _path_component(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip(".")[:MAX_NAME_LENGTH] or "model"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, f"{json.dumps(content, indent=2)}\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with writing(path):
        write_file(path, [text.encode()])


@contextmanager
def lock_run_directory(run: Path, name: str = LOCK_NAME) -> Iterator[None]:
    """Inside, no other gpipe process writes to the run directory; name: that of the lock file.

    The system releases the lock when the process ends, however it ends, so a lock is never stale. What the file
    contains is only for people.
    """
    path = run / name
    descriptor = _acquire_lock(path)
    status = os.fstat(descriptor)
    own_locks.add((status.st_dev, status.st_ino))
    try:
        with writing(path):
            owner = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
            # Written in place: a rename would put the name on a new file, which nobody has locked.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{json.dumps(owner)}\n".encode(), 0)
        yield
    finally:
        # Remove the name before releasing the lock: a process that gets the lock on a removed file notices and tries
        # again. If the directory has become read-only the file stays, and the next writer takes it over.
        with suppress(OSError):
            path.unlink()
        own_locks.discard((status.st_dev, status.st_ino))
        os.close(descriptor)


def _acquire_lock(path: Path) -> int:
    while True:
        with writing(path):
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, base=path.parent)
        try:
            # A record lock belongs to the process: unlike flock's, forked data workers do not inherit it, so a worker
            # that outlives a killed run does not keep the directory locked.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            # POSIX lets a system report a lock held elsewhere as EAGAIN or as EACCES.
            owner = _lock_owner(os.pread(descriptor, 1000, 0))
            os.close(descriptor)
            raise ConfigError(
                f"run_dir={path.parent}: in use by {owner}; wait for it, end it, or choose another run_dir"
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise ResourceError(f"{path}: the run directory cannot be locked: {error}") from error
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        # The last owner removed the file between our open and our lock: lock the new one.
        os.close(descriptor)


def _lock_owner(content: bytes) -> str:
    try:
        owner = parse_json(content)
        return f"process {owner['pid']} on {owner['host']}, since {owner['started']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


@contextmanager
def recorded_outcome(run: Path) -> Iterator[None]:
    """Inside is an attempt to run it: forget how the last one ended, and record which error ends this one, if any."""
    with suppress(OSError):
        (run / OUTCOME).unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        write_outcome(run, error)
        raise


@contextmanager
def recorded_attempt(run: Path) -> Iterator[None]:
    """`recorded_outcome` for an attempt that has yet to open its run; another process may have it, or take it."""
    with suppress(GpipeError), lock_run_directory(run), recorded_outcome(run):
        pass
    try:
        yield
    except BaseException as error:
        with suppress(GpipeError), lock_run_directory(run):
            write_outcome(run, error)
        raise


def write_outcome(run: Path, error: BaseException) -> None:
    """Record which error ended a run, for `run_state`; a run that has finished stays finished."""
    if any((run / name).exists() for name in RESULTS):
        return
    error = as_stopped(error)
    state = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
    with suppress(GpipeError):  # a full disk must not hide the error itself
        content = {"state": state, "exit_code": exit_code(error), "reason": redacted(describe(error))}
        write_json(run / OUTCOME, content)
