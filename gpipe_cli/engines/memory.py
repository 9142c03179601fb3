"""Memory that ran out, told as what it is: how much was asked for, while doing what, and what to try.

torch raises a class of its own for CUDA and a bare RuntimeError for the CPU, which only its text gives away; the system
answers with an OSError or, where a library is to be loaded, with an ImportError. Knows nothing of what was running.
Imports no torch, whose own import may be what fails.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from gpipe_cli.errors import ResourceError

__all__ = ["memory_watched"]

FOR_A_STEP = "try more chunks, checkpoint=always, balance=size or more devices"
_CPU = re.compile(r"DefaultCPUAllocator: .*?memory: you tried to allocate (\d+) bytes")
_CUDA = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_OTHER = (
    "Cannot allocate memory",
    "failed to map segment",
    "can't start new thread",
    "Storage size calculation overflowed",
    "integer multiplication overflow",
)
"""Of the system's calls as Python and torch pass them on, and of tensors larger than any memory."""


@contextmanager
def memory_watched(doing: str = "", cure: str = FOR_A_STEP) -> Iterator[None]:
    """Inside, an allocation that fails is a ResourceError with the notes of the original."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        wanted = _wanted(error)
        if wanted is None:
            raise
        told = ResourceError(f"out of memory{doing and f' while {doing}'}{wanted}; {cure}")
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        raise told from error


def _wanted(error: BaseException) -> str | None:
    """What was asked for, in words; None if memory is not the matter."""
    if isinstance(error, MemoryError):
        return ""
    if isinstance(error, OSError):
        return "" if error.errno == errno.ENOMEM else None
    if found := _CPU.search(str(error)):
        return f": {int(found[1]):,} bytes could not be had"
    if type(error).__name__ == "OutOfMemoryError":  # torch's own
        found = _CUDA.search(str(error))
        return f": {found[1]} could not be had" if found else ""
    return next((f": {text}" for text in _OTHER if text in str(error)), None)
