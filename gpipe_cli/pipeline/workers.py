"""The worker threads: started at first use, kept alive between steps, ended with their pipe."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeAlias, final

from gpipe_cli.errors import StepTimeout
from gpipe_cli.process_lifetime import AwakeClock

_POLL_SECONDS = 0.5

Job = Callable[[], None]
"""Never raises: it keeps its failure for the caller."""
Stop = Callable[[BaseException], None]
"""Tells the running jobs to begin nothing more, and why."""


@final
class WorkerPool:
    def __init__(self, size: int) -> None:
        self._size = size
        self._queues: list[_JobQueue] = []
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        # Two callers of one pipe take turns; otherwise their jobs would wait for each other's actions.
        self.one_caller = threading.Lock()
        weakref.finalize(self, _end_threads, self._queues)

    def __reduce__(self) -> tuple[type[WorkerPool], tuple[int]]:
        # A copied or unpickled pipe starts threads of its own.
        return WorkerPool, (self._size,)

    def run(self, jobs: Sequence[Job], stop: Stop, timeout: float | None) -> None:
        """Run one job per worker and return when all have ended. The caller holds `one_caller`.

        Ctrl-C stops the jobs and waits for them. A second one, or the timeout, abandons the threads: the next run
        starts new ones.
        """
        self._start_threads()
        completion = _Completion(len(jobs))
        items = iter([(job, completion) for job in jobs])
        limit = math.inf if timeout is None else timeout
        clock = AwakeClock()  # Ctrl-Z suspends the workers too
        interrupted = False
        while completion.missing:
            try:
                # One call into C: an interruption arrives before it or after it, never when only some workers have
                # their job. In the second iteration there is nothing left to hand out.
                collections.deque(map(SimpleQueue.put, self._queues, items), maxlen=0)
                # A signal that arrives just before `get` does not interrupt it, so Ctrl-C would go unnoticed: poll.
                seconds = max(0.0, min(limit - clock.seconds, _POLL_SECONDS))
                with contextlib.suppress(queue.Empty):
                    completion.wake_ups.get(timeout=seconds)
                if clock.tick() >= limit and completion.missing:
                    self._give_up(completion, stop, timeout)
                    return
            except BaseException as interruption:
                if interrupted:
                    self._abandon_threads()
                    raise
                interrupted = True
                stop(interruption)

    def _give_up(self, completion: _Completion, stop: Stop, timeout: float | None) -> None:
        _print_stacks()
        self._abandon_threads()
        # If a worker failed before, the caller gets that failure.
        stop(
            StepTimeout(
                f"{completion.missing} of {self._size} workers did not end within step_timeout={timeout} seconds"
            )
        )

    def close(self) -> None:
        """End the threads and wait for them. You may close twice; a closed pool starts new threads when used."""
        threads = self._threads
        self._abandon_threads()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _abandon_threads(self) -> None:
        _end_threads(self._queues)
        self._queues.clear()
        self._threads = []

    def _start_threads(self) -> None:
        if self._process != os.getpid():
            # Threads do not survive a fork.
            self._queues.clear()
            self._threads = []
            self._process = os.getpid()
        while len(self._threads) < self._size:
            jobs: _JobQueue = SimpleQueue()
            name = f"gpipe-worker-{len(self._threads)}"
            # Daemon threads: a pipe that was never closed must not keep the process from ending.
            thread = threading.Thread(target=_work, args=(jobs,), name=name, daemon=True)
            thread.start()
            self._queues.append(jobs)
            self._threads.append(thread)


@final
class _Completion:
    """Counts the jobs that have ended.

    The list counts, not the queue: Ctrl-C may interrupt the caller between `get` and what follows it, and it must not
    wait for that job again.
    """

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._ended: list[None] = []
        self.wake_ups: SimpleQueue[None] = SimpleQueue()

    def add(self) -> None:
        self._ended.append(None)
        self.wake_ups.put(None)

    @property
    def missing(self) -> int:
        return self._expected - len(self._ended)


_JobQueue: TypeAlias = "SimpleQueue[tuple[Job, _Completion] | None]"


def _work(jobs: _JobQueue) -> None:
    """The body of a worker thread. It refers to no pipe while it waits, so a dropped pipe can be collected."""
    while (item := jobs.get()) is not None:
        job, completion = item
        try:
            job()
        finally:
            completion.add()
        del item, job, completion


def _end_threads(queues: Sequence[_JobQueue]) -> None:
    for jobs in queues:
        jobs.put(None)


def _print_stacks() -> None:
    """Print the stack of every thread to stderr, for a step that never ends."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for identity, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        sys.stderr.write(f"Thread {names.get(identity, identity)}:\n{stack}\n")
    sys.stderr.flush()
