"""Memory that ran out, told as what it is: how much was asked for, where, and what to try.

torch raises a class of its own for CUDA and a bare RuntimeError for the CPU, which only its text gives away. Knows
nothing of what was running.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gpipe_cli.errors import ResourceError

__all__ = ["memory_watched"]

_CPU = re.compile(r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (\d+) bytes")
_CUDA = re.compile(r"Tried to allocate ([\d.]+ \w+)")


@contextmanager
def memory_watched() -> Iterator[None]:
    """Inside, an allocation that fails is a ResourceError with the notes of the original."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        wanted = _wanted(error)
        if wanted is None:
            raise
        told = ResourceError(
            f"out of memory{wanted}; try more chunks, checkpoint=always, balance=size or more devices"
        )
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        raise told from error


def _wanted(error: BaseException) -> str | None:
    """What was asked for, in words; None if memory is not the matter."""
    if isinstance(error, MemoryError):
        return ""
    if found := _CPU.search(str(error)):
        return f": {int(found[1]):,} bytes could not be had"
    if isinstance(error, torch.OutOfMemoryError):
        found = _CUDA.search(str(error))
        return f": {found[1]} could not be had" if found else ""
    return None
