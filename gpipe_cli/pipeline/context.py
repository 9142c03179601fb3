"""Where the running code is: which micro-batch, in a checkpointed forward, in recomputation.

Decides what `current_microbatch`, `is_checkpointing` and `is_recomputing` answer in the thread that asks.
Knows nothing of partitions, schedules or tensors.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import final

__all__ = ["MicroBatch", "Running", "current_microbatch", "is_checkpointing", "is_recomputing"]


@final
class MicroBatch:
    """One slice of one mini-batch. Compared by identity, so it serves as a dictionary key or weak
    reference.
    """

    __slots__ = ("__weakref__", "index", "size")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size

    def __repr__(self) -> str:
        return f"MicroBatch(index={self.index}, size={self.size})"


class _Here(threading.local):
    micro_batch: MicroBatch | None = None
    checkpointing: bool = False
    recomputing: bool = False


_here = _Here()


def current_microbatch() -> MicroBatch | None:
    """The micro-batch a layer is working on, the same object in forward and recomputation; None outside a
    pipe.
    """
    return _here.micro_batch


def is_checkpointing() -> bool:
    """True in the first forward of a checkpointed micro-batch, whose activations are not kept."""
    return _here.checkpointing


def is_recomputing() -> bool:
    """True in the second forward of a checkpointed micro-batch. Count and print only while it is False."""
    return _here.recomputing


@final
class Running:
    """Context manager that tells the layers called inside it where they are."""

    __slots__ = ("_before", "_now")

    def __init__(
        self, micro_batch: MicroBatch, *, checkpointing: bool = False, recomputing: bool = False
    ) -> None:
        self._now = (micro_batch, checkpointing, recomputing)

    def __enter__(self) -> None:
        # A pipe may be a layer of another pipe run by the same thread: what was there must come back.
        self._before = (_here.micro_batch, _here.checkpointing, _here.recomputing)
        _here.micro_batch, _here.checkpointing, _here.recomputing = self._now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _here.micro_batch, _here.checkpointing, _here.recomputing = self._before
