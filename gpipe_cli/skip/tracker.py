"""Where a layer's skips go: to the tracker of the thread that runs the layer.

Without a pipeline that is a plain dictionary per thread. The pipeline lends its own, one per partition and
micro-batch, and alone knows how skips travel.
"""

from __future__ import annotations

import threading
from typing import Protocol, final

from torch import Tensor

from gpipe_cli.skip.name import SkipName


class SkipTracker(Protocol):
    def save(self, name: SkipName, value: Tensor | None) -> None:
        """Keep what a layer stashes."""

    def load(self, name: SkipName) -> Tensor | None:
        """Give what was saved and forget it; KeyError if there is nothing."""


@final
class DictionarySkipTracker:
    """Keeps skips until they are popped, or stashed anew."""

    def __init__(self) -> None:
        self._values: dict[SkipName, Tensor | None] = {}

    def save(self, name: SkipName, value: Tensor | None) -> None:
        self._values[name] = value

    def load(self, name: SkipName) -> Tensor | None:
        return self._values.pop(name)


@final
class _Current(threading.local):
    def __init__(self) -> None:
        self.tracker: SkipTracker = DictionarySkipTracker()


_current = _Current()


def current_skip_tracker() -> SkipTracker:
    return _current.tracker


@final
class use_skip_tracker:
    """Let the layers that this thread runs inside the block stash to and pop from `tracker`."""

    __slots__ = ("_previous", "_tracker")

    def __init__(self, tracker: SkipTracker) -> None:
        self._tracker = tracker

    def __enter__(self) -> None:
        self._previous = _current.tracker
        _current.tracker = self._tracker

    def __exit__(self, *exception: object) -> None:
        _current.tracker = self._previous
