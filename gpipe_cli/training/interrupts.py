"""Ctrl-C that cannot be lost: the first one ends the run at the next step boundary, the second at once.

Python turns SIGINT into a KeyboardInterrupt wherever the main thread is, and drops it if that is inside a
destructor, such as the one that ends data workers after an epoch: training would go on as if nothing had been
said. So the signal is remembered, and asked about between batches.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar, final

Item = TypeVar("Item")


@final
class Interrupts:
    def __init__(self) -> None:
        self._seen = False

    def heeded(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items one by one, until there has been an interrupt."""
        for item in items:
            if self._seen:
                raise KeyboardInterrupt
            yield item

    def note(self, number: int, frame: object) -> None:
        """What is done on SIGINT."""
        if self._seen:
            raise KeyboardInterrupt
        self._seen = True


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Inside, SIGINT is remembered; in any thread but the main one Python lets nobody listen."""
    listening = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield listening
        return
    before = signal.signal(signal.SIGINT, listening.note)
    try:
        yield listening
    finally:
        signal.signal(signal.SIGINT, before)
