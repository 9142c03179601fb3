"""Where a fault happens: processes that are watched, so that one that hangs or leaves others behind is noticed.

A scene is played in a forked process of its own. Whatever its children leave behind becomes its child, and what is
mounted in it ends with it. Its launches are forks too: torch is loaded, so they take moments.
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
"""Runs a command line and gives its exit code."""
NOT_PERMITTED = 77
THREADS_LEFT = 99
_SUBREAPER, _NEW_MOUNTS, _NEW_USER = 36, 0x20000, 0x10000000
_READ_ONLY, _REMOUNT, _RECURSIVE, _PRIVATE = 0x1, 0x20, 0x4000, 0x40000
_LIBC = ctypes.CDLL(None, use_errno=True)


class NotPermitted(Exception):
    """This machine does not let us make a file system."""


@final
class Scene:
    """A folder with a run in it; use it inside `play`."""

    def __init__(self, folder: Path, limit: float, command: Command) -> None:
        self.folder, self.run = folder, folder / "run"
        self._limit, self._command = limit, command
        self._ended: dict[int, int] = {}
        self.said = ""
        """What the last process wrote to stderr."""
        self.first: int | None = None
        """A process that is still under way when the next one starts."""

    def start(self, *words: str, inject: Callable[[], None] = lambda: None, stuck: bool = False) -> int:
        """A process that runs the command line; `inject` is called in it before."""
        child = os.fork()
        if child == 0:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                _speak_to(self._speech(os.getpid()))
                os.setsid()
                os.chdir(self.folder)
                inject()
                code = self._command(list(words))
                left = _threads_left(stuck)
                if left:
                    sys.stderr.write(f"threads left: {left}\n")
                    code = THREADS_LEFT
                sys.stderr.flush()
            except BaseException:  # noqa: BLE001 - a child must never return into the scene
                traceback.print_exc()
                code = THREADS_LEFT
            os._exit(code)
        return child

    def end_of(self, child: int) -> int:
        """How it ended: an exit code, or the negative number of a signal."""
        self._reap(lambda: child in self._ended)
        assert child in self._ended, f"hangs: {self._speech(child).read_text()}"
        self.said = self._speech(child).read_text()
        return self._ended[child]

    def launch(self, *words: str, inject: Callable[[], None] = lambda: None, stuck: bool = False) -> int:
        return self.end_of(self.start(*words, inject=inject, stuck=stuck))

    def nobody_left(self) -> bool:
        """Whether every process that was ever started here has ended."""
        return self._reap(lambda: False)

    def mount(self, size: int) -> None:
        """Put the run directory on a disk of that many bytes."""
        self.run.mkdir()
        if os.geteuid() != 0 and _LIBC.unshare(_NEW_USER) != 0:
            raise NotPermitted("no user namespace")
        if _LIBC.unshare(_NEW_MOUNTS) != 0:
            raise NotPermitted("no mount namespace")
        if _LIBC.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None) != 0:
            raise NotPermitted("mounts are shared")
        if _LIBC.mount(b"tmpfs", bytes(self.run), b"tmpfs", 0, b"size=%d" % size) != 0:
            raise NotPermitted("no tmpfs")

    def read_only(self) -> None:
        assert _LIBC.mount(b"tmpfs", bytes(self.run), b"tmpfs", _READ_ONLY | _REMOUNT, None) == 0

    def rows(self) -> list[tuple[int, str]]:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        found: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [(row["step"], row["split"]) for row in found]

    def snapshots(self) -> list[str]:
        return sorted(path.name for path in (self.run / "snapshots").iterdir())

    def _speech(self, child: int) -> Path:
        return self.folder / f"stderr-{child}"

    def _reap(self, enough: Callable[[], bool]) -> bool:
        """Wait for children to end, as long as the limit says; whether none is left."""
        until = time.monotonic() + self._limit
        while not enough():
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if child:
                self._ended[child] = os.waitstatus_to_exitcode(status)
            elif signal.sigtimedwait({signal.SIGCHLD}, max(0.0, until - time.monotonic())) is None:
                return False
        return False


def play(folder: Path, limit: float, command: Command, scene: Callable[[Scene], None]) -> None:
    """Play it; what fails in it fails here."""
    report = folder / "scene"
    warden = os.fork()
    if warden == 0:
        code = 1
        try:
            _speak_to(report)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            _LIBC.prctl(_SUBREAPER, 1)
            scene(Scene(folder, limit, command))
            code = 0
        except NotPermitted:
            code = NOT_PERMITTED
        except BaseException:  # noqa: BLE001 - a child must never return into the tests of its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            _end_children()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(warden, 0)[1])
    if code == NOT_PERMITTED:
        pytest.skip("no file system can be mounted here")
    assert code == 0, report.read_text()


def _speak_to(path: Path) -> None:
    """Streams of its own: those of the tests are captured."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)


def _threads_left(stuck: bool) -> list[threading.Thread]:
    """Those that do not end; with `stuck`, those that would keep the process from ending."""
    left = [one for one in threading.enumerate() if one is not threading.main_thread()]
    for one in left:
        if not (stuck and one.daemon):
            one.join(timeout=5)  # torch's queues end theirs in their own time
    return [one for one in left if one.is_alive() and not (stuck and one.daemon)]


def _end_children() -> None:
    """What a scene that failed has left."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
