"""Report memory that ran out as a ResourceError: how much was asked for, while doing what, and what to try.

torch raises its own class for CUDA, but a bare RuntimeError for the CPU, which only its text identifies. The system
raises an OSError, or an ImportError while loading a library. Imports no torch, whose own import may be what fails.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from gpipe_cli.errors import ResourceError

STEP_CURE = "try more chunks, checkpoint=always, balance=size or more devices"
CPU_ERROR = re.compile(r"DefaultCPUAllocator: .*?memory: you tried to allocate (\d+) bytes")
CUDA_ERROR = re.compile(r"Tried to allocate ([\d.]+ \w+)")
OTHER_ERRORS = (
    "Cannot allocate memory",
    "failed to map segment",
    "can't start new thread",
    "Storage size calculation overflowed",
    "integer multiplication overflow",
)
"""Texts of failed system calls as Python and torch report them, and of tensors larger than any memory."""


@contextmanager
def report_out_of_memory(doing: str = "", cure: str = STEP_CURE) -> Iterator[None]:
    """Turn a failed allocation inside into a ResourceError with the notes of the original error."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        request = _failed_request(error)
        if request is None:
            raise
        out_of_memory = ResourceError(f"out of memory{doing and f' while {doing}'}{request}; {cure}")
        for note in getattr(error, "__notes__", ()):
            out_of_memory.add_note(note)
        raise out_of_memory from error


def _failed_request(error: BaseException) -> str | None:
    """What could not be allocated, as text that may be empty; None if the error is not about memory."""
    if isinstance(error, MemoryError):
        return ""
    if isinstance(error, OSError):
        return "" if error.errno == errno.ENOMEM else None
    if match := CPU_ERROR.search(str(error)):
        return f": cannot allocate {int(match[1]):,} bytes"
    if type(error).__name__ == "OutOfMemoryError":  # torch's own
        match = CUDA_ERROR.search(str(error))
        return f": cannot allocate {match[1]}" if match else ""
    return next((f": {text}" for text in OTHER_ERRORS if text in str(error)), None)
