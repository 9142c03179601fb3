"""What the running thread works on: which micro-batch, and whether it is a checkpointed forward or a recompute."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import final


@final
class MicroBatch:
    """One slice of one mini-batch. Compared by identity, so it can be a dictionary key or a weak reference."""

    __slots__ = ("__weakref__", "index", "size")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size

    def __repr__(self) -> str:
        return f"MicroBatch(index={self.index}, size={self.size})"


@final
class LostSkip(KeyError):
    """A layer looked up its micro-batch in a dictionary of skips that does not have it."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the text as a quoted key


class _Here(threading.local):
    micro_batch: MicroBatch | None = None
    checkpointing: bool = False
    recomputing: bool = False


_here = _Here()


def current_microbatch() -> MicroBatch | None:
    """The micro-batch that a layer is working on, the same object in forward and recompute; None outside a pipe."""
    return _here.micro_batch


def is_checkpointing() -> bool:
    """True in the first forward of a checkpointed micro-batch, whose activations are dropped."""
    return _here.checkpointing


def is_recomputing() -> bool:
    """True in the second forward of a checkpointed micro-batch. Count and print only while it is False."""
    return _here.recomputing


@final
class Running:
    """Context manager: sets what `current_microbatch` and the others return."""

    __slots__ = ("_before", "_now", "_where")

    def __init__(
        self,
        micro_batch: MicroBatch,
        checkpointing: bool = False,
        recomputing: bool = False,
        where: Callable[[], str] | None = None,
    ) -> None:
        """where: names the layer that is running, for a `LostSkip`."""
        self._now = (micro_batch, checkpointing, recomputing)
        self._where = where

    def __enter__(self) -> None:
        # A pipe may be a layer of another pipe in the same thread: restore what was there.
        self._before = (_here.micro_batch, _here.checkpointing, _here.recomputing)
        _here.micro_batch, _here.checkpointing, _here.recomputing = self._now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _here.micro_batch, _here.checkpointing, _here.recomputing = self._before
        # Only the exact type that a dictionary raises: a layer's own exception is not replaced.
        if kind is KeyError and isinstance(error, KeyError) and self._where is not None:
            self._name_lost_skip(error, self._where)

    def _name_lost_skip(self, error: KeyError, where: Callable[[], str]) -> None:
        """Raise `LostSkip` if the missing key contains this micro-batch."""
        micro_batch, _, recomputing = self._now
        key = error.args[0] if len(error.args) == 1 else None
        members = [
            member() if isinstance(member, weakref.ref) else member
            for member in (key if isinstance(key, tuple) else (key,))
        ]
        if not any(member is micro_batch for member in members):
            return
        name = "".join(f", {member!r}" for member in members if type(member) is str)
        lost = "is gone in recomputation" if recomputing else "was not put there before in this process"
        cure = ", or use checkpoint='never'" if recomputing else ""
        raise LostSkip(
            f"{where()} looked up {micro_batch}{name} in a dictionary, and the entry {lost}. "
            f"Hand the tensor over with @skippable (see gpipe_cli.skip){cure}"
        ) from error
