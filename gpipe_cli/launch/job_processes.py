"""Jobs of a sweep side by side: each is a process that runs one command line of gpipe, as a user would start it.

gpipe prints each of their lines with the number of the job, and passes a request to stop on to the running jobs, which
save and stop. The kernel ends the jobs if this process is killed.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, final

from gpipe_cli.errors import Interrupted, PeerError, Stopped
from gpipe_cli.process_lifetime import die_with_parent
from gpipe_cli.report.output import print_status
from gpipe_cli.training.signals import STOP_SIGNALS, install_handlers, stop_requests

START = (
    "import json, sys; task = json.loads(sys.argv[1]); sys.path[:] = task.pop('path'); "
    "from gpipe_cli.launch.job_processes import prepare_child; prepare_child(task.pop('parent')); "
    "from gpipe_cli.__main__ import script; script(**task)"
)
POLL_SECONDS = 0.1
LONGEST_LINE = 2**16
ERROR_PREFIXES = ("gpipe: ", "error: ")
"""What the command line puts before the line that says why it failed."""


@final
@dataclass(frozen=True)
class JobExit:
    number: int
    exit_code: int
    message: str
    """Why it failed or stopped; empty if it finished."""

    @property
    def stopped(self) -> bool:
        return self.exit_code in (Stopped.exit_code, Interrupted.exit_code)


def run_side_by_side(
    numbers: Iterable[int], slots: int, arguments: Callable[[int, int], Sequence[str]], began: float
) -> Generator[JobExit]:
    """Run jobs in as many processes as there are slots, and yield how each ended.

    arguments: the words after `gpipe` of a job in a slot. After a request to stop, and after a job that stopped by
    itself, no further job starts and the others are asked to stop. Close the generator to end all jobs at once.
    """
    waiting, running = deque(numbers), dict[int, _Job]()
    stopping = forwarded = incomplete = False
    with stop_requests() as stops, _ended(running), selectors.DefaultSelector() as selector:
        while running or (waiting and not stopping):
            stopping = stopping or stops.signal is not None
            for slot in range(slots):
                if slot not in running and waiting and not stopping:
                    number = waiting.popleft()
                    running[slot] = _Job.start(number, arguments(number, slot), began)
                    selector.register(running[slot].output, selectors.EVENT_READ, running[slot])
            if stopping and not forwarded:
                forwarded = True
                for job in running.values():
                    # Not the signal itself: a terminal sends Ctrl-C to the jobs too, and a second one means at once.
                    job.process.terminate()
            for key, _ in selector.select(POLL_SECONDS):
                if not key.data.print_lines():
                    selector.unregister(key.fileobj)
            for slot, job in list(running.items()):
                if (job_exit := job.poll()) is not None:
                    del running[slot]
                    if job.output in selector.get_map():
                        selector.unregister(job.output)
                    job.output.close()
                    incomplete = incomplete or job_exit.stopped
                    stopping = stopping or job_exit.stopped
                    yield job_exit
        if stops.request is not None and (waiting or incomplete):
            raise stops.request.error(f"stopped by {stops.request.reason}")


def prepare_child(parent: int) -> None:
    """Called first in the process of a job."""
    die_with_parent(parent)
    install_handlers()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@final
class _Job:
    def __init__(self, number: int, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        self.number, self.process, self.output = number, process, output
        self._unfinished = b""
        self._reason = ""

    @staticmethod
    def start(number: int, words: Sequence[str], began: float) -> _Job:
        task = {
            "parent": os.getpid(),
            "path": sys.path,
            "argv": list(words),
            "number": number,
            "began": began,
        }
        with _signals_blocked():
            process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(task)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert process.stdout is not None, "it is a pipe"
        os.set_blocking(process.stdout.fileno(), False)
        return _Job(number, process, process.stdout)

    def print_lines(self) -> bool:
        """Print what the job has written; False at the end of its output."""
        received = os.read(self.output.fileno(), LONGEST_LINE)
        *lines, self._unfinished = (self._unfinished + received).split(b"\n")
        if not received or len(self._unfinished) > LONGEST_LINE:
            lines, self._unfinished = [*lines, self._unfinished], b""
        for line in lines:
            self._print(line.decode(errors="replace"))
        return bool(received)

    def poll(self) -> JobExit | None:
        code = self.process.poll()
        if code is None:
            return None
        # The pipe need not end with the job: a data worker of a killed job keeps it open for some seconds.
        with suppress(BlockingIOError):
            while self.print_lines():
                pass
        if code >= 0:
            return JobExit(self.number, code, self._reason or (f"exited with code {code}" if code else ""))
        hint = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
        reason = f"its process was killed by {signal.Signals(-code).name}{hint}"
        return JobExit(self.number, PeerError.exit_code, reason)

    def _print(self, line: str) -> None:
        if line.startswith(ERROR_PREFIXES[0]):
            self._reason = line
            for prefix in ERROR_PREFIXES:
                self._reason = self._reason.removeprefix(prefix)
        elif line.strip():
            print_status(f"job {self.number}: {line}")


@contextmanager
def _ended(running: Mapping[int, _Job]) -> Iterator[None]:
    """At the end, kill the jobs that still run."""
    try:
        yield
    finally:
        for job in running.values():
            job.process.kill()
            job.process.wait()
            job.output.close()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process that is started inside receives signals only after it has installed its handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
