"""The name of a skip, and where it goes: to the tracker of the thread that runs the layer.

Outside a pipeline that is a dictionary per thread. The pipeline installs its own tracker for each partition and
micro-batch; only that tracker knows how skips travel between partitions.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, final

from torch import Tensor

_counter = itertools.count(1)


@final
@dataclass(frozen=True, order=True, slots=True)
class Namespace:
    """Separates skips that share a name. Takes no arguments. A copy, pickled or not, equals its original."""

    number: int = field(default_factory=lambda: next(_counter), kw_only=True)
    """Creation order within the process; decides how namespaces sort."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex, kw_only=True, repr=False)
    """Distinguishes namespaces that different processes created with the same number."""


@final
class SkipName(NamedTuple):
    """The full name of a skip. It unpacks: `for namespace, name in layer.stashable()`."""

    namespace: Namespace | None
    """None for a skip that no layer has isolated."""
    name: str

    def __lt__(self, other: SkipName) -> bool:  # type: ignore[override]  # only skip names are sorted together
        return self._order() < other._order()

    def _order(self) -> tuple[list[Namespace], str]:
        return ([] if self.namespace is None else [self.namespace], self.name)


class SkipTracker(Protocol):
    """Keeps stashed values until they are popped."""

    def save(self, name: SkipName, value: Tensor | None) -> None:
        """Store a stashed value."""

    def load(self, name: SkipName) -> Tensor | None:
        """Return a stored value and drop it; raise KeyError if there is none."""


@final
class DictionarySkipTracker:
    """Stores skips until a layer pops them or stashes a new value under the same name."""

    def __init__(self) -> None:
        self._values: dict[SkipName, Tensor | None] = {}

    def save(self, name: SkipName, value: Tensor | None) -> None:
        self._values[name] = value

    def load(self, name: SkipName) -> Tensor | None:
        return self._values.pop(name)


@final
class _Current(threading.local):
    # threading.local calls __init__ in each thread that first reads it, so every thread gets its own dictionary.
    def __init__(self) -> None:
        self.tracker: SkipTracker = DictionarySkipTracker()


_current = _Current()


def save_skip(name: SkipName, value: Tensor | None) -> None:
    """Store a value for the layer that pops it."""
    if value is not None:
        # A view gives the skip an autograd node of its own. Autograd then sums the gradients of all uses of the skip
        # first and adds that sum to the gradients of the value's other uses, so the order of the additions, and with
        # it the bits, do not depend on whether the skip crosses to another partition. This also holds without
        # gradients: a checkpointed forward must pass on the same kind of tensor as its recomputation.
        value = value.view_as(value)
    _current.tracker.save(name, value)


def load_skip(name: SkipName) -> Tensor | None:
    """Return the stored value, which can be popped once."""
    try:
        return _current.tracker.load(name)
    except KeyError as error:
        raise RuntimeError(f"'{name.name}' has not been stashed") from error


@final
class use_skip_tracker:
    """Make layers that this thread runs inside the `with` block use `tracker`.

    A class instead of a `@contextmanager` generator, because workers enter it for every layer they run.
    """

    __slots__ = ("_previous", "_tracker")

    def __init__(self, tracker: SkipTracker) -> None:
        self._tracker = tracker

    def __enter__(self) -> None:
        self._previous = _current.tracker
        _current.tracker = self._tracker

    def __exit__(self, *exception: object) -> None:
        _current.tracker = self._previous
