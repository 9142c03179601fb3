"""A sandbox for runs with injected faults: it notices a run that hangs or leaves processes behind.

A sandbox is a forked process. It adopts the orphans of its children, and its mounts disappear when it ends. Each run
in it is a fork too: torch is loaded already, so a run starts at once.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import pytest

Command = Callable[[list[str]], int]
"""Runs a command line and returns its exit code."""
NOT_PERMITTED = 77
THREADS_LEFT = 99
_SUBREAPER, _NEW_MOUNTS, _NEW_USER = 36, 0x20000, 0x10000000
_READ_ONLY, _REMOUNT, _RECURSIVE, _PRIVATE = 0x1, 0x20, 0x4000, 0x40000
_LIBC = ctypes.CDLL(None, use_errno=True)


class NotPermitted(Exception):
    """This machine does not let us mount a file system."""


@final
class Sandbox:
    """A folder with a run directory, and the processes that were started in it; see `run_in_sandbox`."""

    def __init__(self, folder: Path, limit: float, command: Command) -> None:
        self.folder, self.run = folder, folder / "run"
        self._limit, self._command = limit, command
        self._exit_codes: dict[int, int] = {}
        self.stderr = ""
        """Output of the last process that was waited for."""
        self.running: int | None = None
        """A process that is still running when the next one starts."""

    def start(
        self, *arguments: str, inject: Callable[[], None] = lambda: None, has_stuck_thread: bool = False
    ) -> int:
        """Fork a process that calls `inject` and then runs the command line."""
        child = os.fork()
        if child == 0:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                _redirect_output(self._stderr_file(os.getpid()))
                os.setsid()
                os.chdir(self.folder)
                inject()
                code = self._command(list(arguments))
                left = _threads_left(has_stuck_thread)
                if left:
                    sys.stderr.write(f"threads left: {left}\n")
                    code = THREADS_LEFT
                sys.stderr.flush()
            except BaseException:  # noqa: BLE001 - a child must never return into the sandbox
                traceback.print_exc()
                code = THREADS_LEFT
            os._exit(code)
        return child

    def wait(self, child: int) -> int:
        """Wait for a process; return its exit code, or the negative number of the signal that killed it."""
        self._reap(lambda: child in self._exit_codes)
        assert child in self._exit_codes, f"hangs: {self._stderr_file(child).read_text()}"
        self.stderr = self._stderr_file(child).read_text()
        return self._exit_codes[child]

    def launch(
        self, *arguments: str, inject: Callable[[], None] = lambda: None, has_stuck_thread: bool = False
    ) -> int:
        return self.wait(self.start(*arguments, inject=inject, has_stuck_thread=has_stuck_thread))

    def all_ended(self) -> bool:
        """Wait for every process that was started here, also indirectly; return whether all have ended."""
        return self._reap(lambda: False)

    def mount(self, size: int) -> None:
        """Put the run directory on a disk of `size` bytes."""
        self.run.mkdir()
        if os.geteuid() != 0 and _LIBC.unshare(_NEW_USER) != 0:
            raise NotPermitted("no user namespace")
        if _LIBC.unshare(_NEW_MOUNTS) != 0:
            raise NotPermitted("no mount namespace")
        if _LIBC.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None) != 0:
            raise NotPermitted("mounts are shared")
        if _LIBC.mount(b"tmpfs", bytes(self.run), b"tmpfs", 0, b"size=%d" % size) != 0:
            raise NotPermitted("no tmpfs")

    def remount_read_only(self) -> None:
        assert _LIBC.mount(b"tmpfs", bytes(self.run), b"tmpfs", _READ_ONLY | _REMOUNT, None) == 0

    def rows(self) -> list[tuple[int, str]]:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [(row["step"], row["split"]) for row in rows]

    def snapshots(self) -> list[str]:
        return sorted(path.name for path in (self.run / "snapshots").iterdir())

    def _stderr_file(self, child: int) -> Path:
        return self.folder / f"stderr-{child}"

    def _reap(self, enough: Callable[[], bool]) -> bool:
        """Reap children until `enough` or the time limit; return whether none is left."""
        until = time.monotonic() + self._limit
        while not enough():
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if child:
                self._exit_codes[child] = os.waitstatus_to_exitcode(status)
            elif signal.sigtimedwait({signal.SIGCHLD}, max(0.0, until - time.monotonic())) is None:
                return False
        return False


def run_in_sandbox(folder: Path, limit: float, command: Command, check: Callable[[Sandbox], None]) -> None:
    """Call `check` in a new sandbox; an assertion that fails there fails here."""
    report = folder / "sandbox"
    sandbox = os.fork()
    if sandbox == 0:
        code = 1
        try:
            _redirect_output(report)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            _LIBC.prctl(_SUBREAPER, 1)
            # Times that an earlier test measured would let a command pass by what a row wants to disturb.
            os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
            check(Sandbox(folder, limit, command))
            code = 0
        except NotPermitted:
            code = NOT_PERMITTED
        except BaseException:  # noqa: BLE001 - a child must never return into the tests of its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            _kill_children()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(sandbox, 0)[1])
    if code == NOT_PERMITTED:
        pytest.skip("no file system can be mounted here")
    assert code == 0, report.read_text()


def _redirect_output(path: Path) -> None:
    """Give this process its own output: pytest captures the parent's."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)


def _threads_left(has_stuck_thread: bool) -> list[threading.Thread]:
    """Threads that do not end. A stuck daemon thread is tolerated if expected: it does not keep the process alive."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    expected_to_end = [thread for thread in others if not (has_stuck_thread and thread.daemon)]
    for thread in expected_to_end:
        thread.join(timeout=60)  # torch's queues take a moment to end their threads
    return [thread for thread in expected_to_end if thread.is_alive()]


def _kill_children() -> None:
    """End what a failed check has left running."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
