"""Requests to stop: signals, and a time limit that comes near. They are recorded at once and acted on between batches.

Imports no torch: the handlers are installed before anything else is imported.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar, final

from gpipe_cli.errors import Interrupted, Stopped

Item = TypeVar("Item")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
NO_REQUEST, TIME_LIMIT = 0, 1000
"""A request as a number, for ranks to agree on: one of these, or the number of a signal. The largest one counts."""

Agree = Callable[[int], int]
"""A collective that returns the largest of the numbers the ranks pass to it; a single process gets its own back."""


@final
class StopRequested(Exception):
    """Raised between two batches when a request to stop is acted on."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def by_keyboard(self) -> bool:
        return self.reason == _signal_name(signal.SIGINT)

    def error(self, text: str) -> Stopped:
        """The error that ends the command: exit code 130 for Ctrl-C, 75 for any other request."""
        return Interrupted(text) if self.by_keyboard else Stopped(text)


@final
class StopNow(KeyboardInterrupt):
    """Raised by the signal handler itself, wherever the main thread is, while there is nothing to save yet."""

    def __init__(self, request: StopRequested) -> None:
        super().__init__(request.reason)
        self.request = request


def as_stopped(error: BaseException) -> BaseException:
    """The error with which a command ends that was stopped by a signal; any other error as it is."""
    return error.request.error(f"stopped by {error}") if isinstance(error, StopNow) else error


@final
class SignalInbox:
    """The signals this process has received.

    Python runs a handler wherever the main thread is: in the middle of an optimizer update, or inside a destructor,
    which swallows exceptions. So the handler only records the first signal, and training polls for it between
    batches. The handler raises only while nothing can be saved yet (planning, measuring, building). Repeated signals
    are one request, because a closed terminal sends SIGHUP twice and a scheduler may send SIGTERM in bursts; only a
    second Ctrl-C ends the process at once.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.patient = False
        """Ignore a second Ctrl-C. A rank may receive a single Ctrl-C twice, from the terminal, which signals the
        whole process group, and from its launcher. Only the launcher decides to end at once."""
        self._interrupted = self._ended = False
        self._raises = False
        self._raised = False
        self._leave: Callable[[StopNow], NoReturn] | None = None

    def handle(self, number: int, frame: object) -> None:
        """The handler of every stop signal."""
        # Ctrl-C is counted apart from other signals: SIGTERM followed by one Ctrl-C is still a single request.
        again, self._interrupted = self._interrupted, self._interrupted or number == signal.SIGINT
        if self.first is None:
            self.first = number
            if self._leave is not None:
                self._leave(self._stop_now())
            if self._raises:
                raise self._stop_now()
        elif again and number == signal.SIGINT and not self.patient and not self._ended:
            # Once only: a third Ctrl-C must not interrupt the cleanup that the second one started.
            self._ended = True
            raise KeyboardInterrupt

    @contextmanager
    def raise_immediately(self) -> Iterator[None]:
        """Inside, the first signal raises StopNow at once; one received earlier raises it on entry."""
        before, self._raises = self._raises, True
        try:
            if self.first is not None:
                raise self._stop_now()
            yield
        except (StopNow, Stopped):
            raise  # already the stop, or the error that a command made of it
        except BaseException as error:
            if not self._raised:
                raise
            # The interrupted code turned StopNow into another error, as the import of a C extension does.
            raise self._stop_now() from error
        finally:
            self._raises = before

    @contextmanager
    def defer(self, *, patient: bool = False) -> Iterator[None]:
        """Inside, a signal is only recorded; the code inside polls for it."""
        before = self._raises, self.patient
        self._raises, self.patient = False, patient
        try:
            yield
        finally:
            self._raises, self.patient = before

    @contextmanager
    def leave_immediately(self, leave: Callable[[StopNow], NoReturn]) -> Iterator[None]:
        """Inside, the first signal ends the process by `leave`: C++ code that imports modules aborts it on errors."""
        self._leave = leave
        try:
            if self.first is not None:
                leave(self._stop_now())
            yield
        finally:
            self._leave = None

    def _stop_now(self) -> StopNow:
        assert self.first is not None, "a signal was received"
        self._raised = True
        return StopNow(StopRequested(_signal_name(self.first)))


_inbox: SignalInbox | None = None
"""Signals are sent to a process, so a process has one inbox."""


def install_handlers() -> SignalInbox:
    """Record signals from now on, except those this process was started to ignore (nohup, a job with &)."""
    global _inbox
    if _inbox is None:
        _inbox = SignalInbox()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _inbox.handle)
    return _inbox


def ignore_signals() -> None:
    """After a stop request, ignore further signals: the process is about to end, and its exit code is decided.

    Python restores the default handlers at its very end, when the last signal of a burst would kill the process.
    """
    if _inbox is not None and _inbox.first is not None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def handlers_installed() -> Iterator[SignalInbox]:
    """The inbox of this process; where no handlers are installed yet, install them for the duration of the block."""
    global _inbox
    if threading.current_thread() is not threading.main_thread():
        yield SignalInbox()  # only the main thread may install handlers; Python runs them there as well
        return
    if _inbox is not None:
        yield _inbox
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield install_handlers()
    finally:
        _inbox = None
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_immediately() -> Iterator[None]:
    """Inside, except within `defer_signals` and `stop_requests`, a signal raises StopNow."""
    with handlers_installed() as inbox, inbox.raise_immediately():
        yield


@contextmanager
def leave_immediately(leave: Callable[[StopNow], NoReturn]) -> Iterator[None]:
    """Inside, a signal ends this process by `leave`, without an exception that the code inside could meet."""
    with handlers_installed() as inbox, inbox.leave_immediately(leave):
        yield


@contextmanager
def defer_signals() -> Iterator[None]:
    """Inside, a signal waits: something is being written, or the code inside will poll for it."""
    with handlers_installed() as inbox, inbox.defer():
        yield


@final
class StopRequests:
    """What asks this process, or any rank, to stop.

    deadline: when to have stopped, by the monotonic clock. reserve: the seconds that a clean stop takes.
    """

    def __init__(
        self, inbox: SignalInbox, deadline: float | None = None, agree: Agree = lambda number: number
    ) -> None:
        self._inbox = inbox
        self._deadline = deadline
        self._agree = agree
        self._agreed = NO_REQUEST
        self.reserve = 0.0

    @property
    def signal(self) -> int | None:
        """The first stop signal this process received."""
        return self._inbox.first

    @property
    def request(self) -> StopRequested | None:
        """The request this process knows of: its own, or the one the ranks agreed on."""
        return _as_request(self._agreed or self._own_request())

    def agreed(self) -> StopRequested | None:
        """The request that all ranks act on now. A collective: all ranks must call it at the same batch."""
        # All ranks hold the same agreed number, so from the first request on all of them skip the collective.
        if self._agreed == NO_REQUEST:
            self._agreed = self._agree(self._own_request())
        return _as_request(self._agreed)

    def until_stopped(self, items: Iterable[Item]) -> Iterator[Item]:
        """Pass the items on; on a request to stop, close their source and raise StopRequested."""
        try:
            for item in items:
                if request := self.agreed():
                    raise request
                yield item
        finally:
            close = getattr(items, "close", None)
            # Of a generator: ends the data workers behind it now instead of at garbage collection.
            if close is not None:
                close()

    def _own_request(self) -> int:
        if self._inbox.first is not None:
            return self._inbox.first
        # The reserve is the time that a clean stop takes, so that it ends before the deadline instead of starting
        # there.
        late = self._deadline is not None and time.monotonic() + self.reserve >= self._deadline
        return TIME_LIMIT if late else NO_REQUEST


@contextmanager
def stop_requests(
    *, deadline: float | None = None, agree: Agree = lambda number: number, patient: bool = False
) -> Iterator[StopRequests]:
    """Inside, signals and the deadline wait to be polled for; patient: see SignalInbox."""
    with handlers_installed() as inbox, inbox.defer(patient=patient):
        yield StopRequests(inbox, deadline, agree)


def _as_request(number: int) -> StopRequested | None:
    if number == NO_REQUEST:
        return None
    return StopRequested("time_limit" if number == TIME_LIMIT else _signal_name(number))


def _signal_name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
