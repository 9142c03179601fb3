"""Requests to stop that cannot be lost: a signal, or a time limit that comes near.

Python runs a handler wherever the main thread is, in the middle of an update or inside a destructor, which swallows
what it raises. So a handler remembers the first signal, and training looks for it between batches. Only where nothing
can be saved yet (planning, measuring, building) does the handler raise as well. Repeated signals are one request: a
closed terminal sends two SIGHUP, a scheduler may send SIGTERM in bursts. Only a second Ctrl-C ends a run at once.
Knows nothing of what is done about a request, and imports no torch: handlers are installed before anything else.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar, final

from gpipe_cli.errors import Interrupted, Stopped

Item = TypeVar("Item")
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

    def error(self, text: str) -> Stopped:
        """What the command ends with."""
        return Interrupted(text) if self.by_keyboard else Stopped(text)


@final
class StopNow(KeyboardInterrupt):
    """Raised by a signal wherever the main thread is, where nothing can be saved."""

    def __init__(self, request: StopRequested) -> None:
        super().__init__(request.reason)
        self.request = request


@final
class Inbox:
    """The signals that this process was sent."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.patient = False
        """Whether a second Ctrl-C changes nothing. One process of several may be sent the same signal twice, by a
        terminal that signals them all and by its launcher, which is the one to be impatient."""
        self._interrupted = self._ended = False
        self._raises = False
        self._raised = False

    def note(self, number: int, frame: object) -> None:
        """The handler of every signal."""
        again, self._interrupted = self._interrupted, self._interrupted or number == signal.SIGINT
        if self.first is None:
            self.first = number
            if self._raises:
                raise self._now()
        elif again and number == signal.SIGINT and not self.patient and not self._ended:
            self._ended = True
            raise KeyboardInterrupt

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, the first signal raises StopNow at once; one that came before does so here."""
        before, self._raises = self._raises, True
        try:
            if self.first is not None:
                raise self._now()
            yield
        except (StopNow, Stopped):
            raise
        except BaseException as error:
            if not self._raised:
                raise
            # Whoever was interrupted made another error of it, as an import of a C extension does.
            raise self._now() from error
        finally:
            self._raises = before

    @contextmanager
    def waiting(self, *, patient: bool = False) -> Iterator[None]:
        """Inside, a signal waits for whoever looks for it."""
        before = self._raises, self.patient
        self._raises, self.patient = False, patient
        try:
            yield
        finally:
            self._raises, self.patient = before

    def _now(self) -> StopNow:
        assert self.first is not None, "a signal was noted"
        self._raised = True
        return StopNow(StopRequested(_name(self.first)))


_inbox: Inbox | None = None
"""The one of this process: signals are sent to a process, so it has one."""


def listen() -> Inbox:
    """Remember signals from now on, except those this process was told to ignore (nohup, a job with &)."""
    global _inbox
    if _inbox is None:
        _inbox = Inbox()
        for one in ALL:
            if signal.getsignal(one) is not signal.SIG_IGN:
                signal.signal(one, _inbox.note)
    return _inbox


def stop_listening() -> None:
    """The process is about to end by itself, and how is decided: a signal that comes now changes nothing.

    Python puts back the default handlers at its very end, where the last signal of a burst would kill it.
    """
    if _inbox is not None and _inbox.first is not None:
        for one in ALL:
            signal.signal(one, signal.SIG_IGN)


@contextmanager
def listening() -> Iterator[Inbox]:
    """Inside, signals are remembered: as before if this process listens anyway, else for as long as this lasts.

    In any thread but the main one Python lets nobody listen.
    """
    global _inbox
    if threading.current_thread() is not threading.main_thread():
        yield Inbox()
        return
    if _inbox is not None:
        yield _inbox
        return
    before = {one: signal.getsignal(one) for one in ALL}
    try:
        yield listen()
    finally:
        _inbox = None
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Inside, and outside of what waits for a boundary, a signal raises StopNow."""
    with listening() as inbox, inbox.raising():
        yield


@contextmanager
def stopped_at_boundaries() -> Iterator[None]:
    """Inside, a signal waits: something is being written, or will be looked after."""
    with listening() as inbox, inbox.waiting():
        yield


@final
class StopRequests:
    """deadline: when to have stopped, by the monotonic clock. reserve: seconds it takes to stop in good order."""

    def __init__(
        self, inbox: Inbox, deadline: float | None = None, agree: Agree = lambda number: number
    ) -> None:
        self._inbox = inbox
        self._deadline = deadline
        self._agree = agree
        self._agreed = NOTHING
        self.reserve = 0.0

    @property
    def signal(self) -> int | None:
        """The first that this process was sent."""
        return self._inbox.first

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

    def _own(self) -> int:
        if self._inbox.first is not None:
            return self._inbox.first
        late = self._deadline is not None and time.monotonic() + self.reserve >= self._deadline
        return TIME_LIMIT if late else NOTHING


@contextmanager
def stop_requests(
    *, deadline: float | None = None, agree: Agree = lambda number: number, patient: bool = False
) -> Iterator[StopRequests]:
    """Inside, signals and the deadline wait for whoever asks at a boundary; patient: as of an Inbox."""
    with listening() as inbox, inbox.waiting(patient=patient):
        yield StopRequests(inbox, deadline, agree)


def _request(number: int) -> StopRequested | None:
    if number == NOTHING:
        return None
    return StopRequested("time_limit" if number == TIME_LIMIT else _name(number))


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
