"""The threads that run partitions: started at first use, kept between steps, ended with their pipe.

Decides the life of threads and how a caller waits for them. Knows nothing of what they run.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import final

from gpipe_cli.errors import StepTimeout
from gpipe_cli.pipeline.stacks import print_stacks

__all__ = ["WorkerPool"]

_LOOK_UP_SECONDS = 0.5

Job = Callable[[], None]
"""Something that never raises: it keeps its failure for the caller."""
Stop = Callable[[BaseException], None]
"""Tells the running jobs not to begin anything more, and why."""


@final
class WorkerPool:
    def __init__(self, size: int) -> None:
        self._size = size
        self._commands: list[SimpleQueue[Job | None]] = []
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        # Two callers of one pipe take turns: their jobs would wait for each other's actions otherwise.
        self.turn = threading.Lock()
        weakref.finalize(self, _end, self._commands)

    def __reduce__(self) -> tuple[type[WorkerPool], tuple[int]]:
        # A copied or unpickled pipe starts threads of its own.
        return WorkerPool, (self._size,)

    def run(self, jobs: Sequence[Job], stop: Stop, timeout: float | None) -> None:
        """Run one job per worker and return when all have ended; for whoever holds `turn`.

        Ctrl-C stops them first; a second one, or `timeout` seconds, leaves them to themselves: the next run
        gets new threads.
        """
        self._start()
        ends = _Ends(len(jobs))
        reporting = iter([functools.partial(ends.run, job) for job in jobs])
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        interrupted = False
        while not ends.all_there:
            try:
                # One call into C: an interruption comes before it or after it, never when some workers have
                # their job and others do not. The second time round there is nothing left to hand out.
                collections.deque(map(SimpleQueue.put, self._commands, reporting), maxlen=0)
                ends.wait(deadline)
            except _TooLate:
                print_stacks()
                self._abandon()
                # If a worker failed before, that failure is what the caller gets.
                stop(
                    StepTimeout(
                        f"{ends.missing} of {self._size} workers did not end within step_timeout={timeout} seconds"
                    )
                )
                return
            except BaseException as interruption:
                if interrupted:
                    self._abandon()
                    raise
                interrupted = True
                stop(interruption)

    def close(self) -> None:
        """End the threads and wait for them. Closing twice is fine; a closed pool starts anew when used."""
        threads = self._threads
        self._abandon()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _abandon(self) -> None:
        _end(self._commands)
        self._forget()

    def _forget(self) -> None:
        self._commands.clear()
        self._threads = []

    def _start(self) -> None:
        if self._process != os.getpid():
            # Threads do not survive a fork.
            self._forget()
            self._process = os.getpid()
        while len(self._threads) < self._size:
            commands: SimpleQueue[Job | None] = SimpleQueue()
            name = f"gpipe-worker-{len(self._threads)}"
            # Daemons: a pipe that nobody closed must not keep the process from ending.
            thread = threading.Thread(target=_serve, args=(commands,), name=name, daemon=True)
            thread.start()
            self._commands.append(commands)
            self._threads.append(thread)


def _end(commands: Sequence[SimpleQueue[Job | None]]) -> None:
    for queue_of_one in commands:
        queue_of_one.put(None)


def _serve(commands: SimpleQueue[Job | None]) -> None:
    """A worker's life. It holds nothing of a pipe while it waits, so a dropped pipe can be collected."""
    while (job := commands.get()) is not None:
        job()
        del job


@final
class _TooLate(Exception):
    """The deadline has passed."""


@final
class _Ends:
    """Counts jobs that have ended. What counts is the list: a caller may be interrupted between being woken
    and noting why, and must not wait for that job again.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._ended: list[None] = []
        self._news: SimpleQueue[None] = SimpleQueue()

    def run(self, job: Job) -> None:
        try:
            job()
        finally:
            self._ended.append(None)
            self._news.put(None)

    def wait(self, deadline: float) -> None:
        """Return when something may have changed."""
        # A signal that comes just before the wait does not end it, so Ctrl-C would go unnoticed: look up
        # often.
        remaining = deadline - time.monotonic()
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=max(0.0, min(remaining, _LOOK_UP_SECONDS)))
        if time.monotonic() >= deadline and self.missing:
            raise _TooLate

    @property
    def missing(self) -> int:
        return self._expected - len(self._ended)

    @property
    def all_there(self) -> bool:
        return self.missing == 0
