"""One piece of work at a time beside the training thread.

What it raised is raised in the training thread, at the next time it asks. Knows nothing of snapshots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final


class Abandoned(Exception):
    """Raised inside work that is no longer wanted."""


@final
class Background:
    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._abandoned = threading.Event()
        self._ended = threading.Event()

    def start(self, work: Callable[[Callable[[], None]], None]) -> None:
        """Begin, once the work before has ended. The work is given a function to call now and then."""
        self.wait()
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, args=(work,), name="gpipe-snapshot", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong, if anything has."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Until the work has ended; then as `check`."""
        self._join()
        self.check()

    def abandon(self) -> None:
        """End the work at the next place where it asks; whatever it raises is of no interest any more."""
        self._abandoned.set()
        self._join()
        self._failure = None

    def _join(self) -> None:
        """A join that a signal interrupts takes the thread for ended ever after, so an event is waited for first."""
        if self._thread is not None:
            self._ended.wait()
            self._thread.join()
            self._thread = None

    def _run(self, work: Callable[[Callable[[], None]], None]) -> None:
        try:
            work(self._between)
        except BaseException as error:  # noqa: BLE001 - the training thread decides
            self._failure = error
        finally:
            self._ended.set()

    def _between(self) -> None:
        if self._abandoned.is_set():
            raise Abandoned
