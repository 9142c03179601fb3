"""Requests to stop that cannot be lost: the first is heeded at the next step boundary, the second at once.

A request is a signal or a time limit that comes near. Python runs a handler wherever the main thread is, in the
middle of an update or inside a destructor, which swallows what it raises; so a handler only remembers, and is
asked between batches. Knows nothing of what is done about a request.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, final

Item = TypeVar("Item")
INTERRUPT = (signal.SIGINT,)
ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
NOTHING, TIME_LIMIT = 0, 1000
"""Beside the numbers of signals, what a request is to a team of processes: the largest of theirs counts."""

Agree = Callable[[int], int]
"""Gives all processes of a team the largest of the numbers they call it with; one alone gets its own."""


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
    """deadline: when to have stopped, by the monotonic clock. reserve: seconds it takes to stop in good order.

    patient: whether a second signal changes nothing. One process of several may be sent the same one twice, by a
    scheduler that signals them all and by its launcher, which is the one to be impatient.
    """

    def __init__(
        self,
        deadline: float | None = None,
        agree: Agree = lambda number: number,
        *,
        patient: bool = False,
    ) -> None:
        self._signal: int | None = None
        self._deadline = deadline
        self._agree = agree
        self._patient = patient
        self._agreed = NOTHING
        self.reserve = 0.0

    @property
    def signal(self) -> int | None:
        """The first that this process was sent."""
        return self._signal

    @property
    def request(self) -> StopRequested | None:
        """What this process knows of, be it from itself or agreed upon."""
        return _request(self._agreed or self._own())

    def agreed(self) -> StopRequested | None:
        """What all processes of the team heed now: each asks at the same boundaries, or they would wait for ever."""
        if self._agreed == NOTHING:
            self._agreed = self._agree(self._own())
        return _request(self._agreed)

    def heeded(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items one by one, until somebody asks to stop; then whatever makes them is ended."""
        try:
            for item in items:
                if request := self.agreed():
                    raise request
                yield item
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def note(self, number: int, frame: object) -> None:
        """What is done on a signal."""
        if self._signal is None:
            self._signal = number
        elif not self._patient:
            raise KeyboardInterrupt

    def _own(self) -> int:
        if self._signal is not None:
            return self._signal
        late = self._deadline is not None and time.monotonic() + self.reserve >= self._deadline
        return TIME_LIMIT if late else NOTHING


@contextmanager
def stop_requests(
    signals: Sequence[signal.Signals] = ALL,
    *,
    deadline: float | None = None,
    agree: Agree = lambda number: number,
    patient: bool = False,
) -> Iterator[StopRequests]:
    """Inside, the signals are remembered, except those this process was told to ignore (nohup, a job with &).

    In any thread but the main one Python lets nobody listen.
    """
    listening = StopRequests(deadline, agree, patient=patient)
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


def _request(number: int) -> StopRequested | None:
    if number == NOTHING:
        return None
    return StopRequested("time_limit" if number == TIME_LIMIT else _name(number))


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
