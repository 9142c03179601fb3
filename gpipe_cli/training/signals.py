"""Requests to stop that cannot be lost: the first is heeded at the next step boundary, the second at once.

A request is a signal or a time limit that comes near. Python runs a handler wherever the main thread is, in the
middle of an update or inside a destructor, which swallows what it raises; so a handler only remembers, and is
asked between batches. Knows nothing of what is done about a request.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, final

Item = TypeVar("Item")
INTERRUPT = (signal.SIGINT,)
ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@final
class StopRequested(Exception):
    """Raised at a boundary by whoever heeds a request; says what asked."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def by_keyboard(self) -> bool:
        return self.reason == _name(signal.SIGINT)


@final
class StopRequests:
    """deadline: when to have stopped, by the monotonic clock. reserve: seconds it takes to stop in good order."""

    def __init__(self, deadline: float | None = None) -> None:
        self._signal: int | None = None
        self._deadline = deadline
        self.reserve = 0.0

    @property
    def request(self) -> StopRequested | None:
        if self._signal is not None:
            return StopRequested(_name(self._signal))
        if self._deadline is not None and time.monotonic() + self.reserve >= self._deadline:
            return StopRequested("time_limit")
        return None

    def heeded(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items one by one, until somebody asks to stop; then whatever makes them is ended."""
        try:
            for item in items:
                if request := self.request:
                    raise request
                yield item
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def note(self, number: int, frame: object) -> None:
        """What is done on a signal."""
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number


@contextmanager
def stop_requests(
    signals: Sequence[signal.Signals] = ALL, *, deadline: float | None = None
) -> Iterator[StopRequests]:
    """Inside, the signals are remembered, except those this process was told to ignore (nohup, a job with &).

    In any thread but the main one Python lets nobody listen.
    """
    listening = StopRequests(deadline)
    if threading.current_thread() is not threading.main_thread():
        yield listening
        return
    before = {one: signal.getsignal(one) for one in signals}
    try:
        for one, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(one, listening.note)
        yield listening
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
