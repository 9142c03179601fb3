"""Where slices are kept while they are not worked on: in the memory of the host, or in a file.

A tier hands out regions, rows of bytes that are read into and written from memory of the caller's. The file has no
name, so that nothing of it outlives the process whatever ends it; its space is reserved beforehand, and it is never
synced, as nobody will read it again. Nothing is mapped: mapped pages count as memory of the process. Knows nothing of
what the bytes mean.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar, final

import torch
from torch import Tensor

from gpipe_cli.errors import ResourceError

__all__ = ["TIERS", "CpuTier", "DiskTier", "Region", "Tier"]

TIERS = ("cpu", "disk")
Result = TypeVar("Result")


class Region(Protocol):
    """A row of bytes of a fixed length."""

    @property
    def memory(self) -> Tensor | None:
        """The bytes themselves, where they can be had without reading."""

    def read(self, begin: int, into: Tensor) -> None:
        """Fill `into`, bytes on any device, from there on."""

    def write(self, begin: int, source: Tensor) -> None:
        """Put `source`, bytes on any device, there."""


class Tier(Protocol):
    def reserve(self, nbytes: int) -> None:
        """Make sure of room for so many more bytes; a ResourceError where there is none."""

    def region(self, nbytes: int) -> Region: ...

    def leaves(self, device: torch.device) -> bool:
        """Whether what is kept here takes no memory of the device."""

    def close(self) -> None: ...


@final
class CpuTier:
    """Memory of the host; pinned where it is copied to and from a CUDA device, which is the quick way there."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"

    def reserve(self, nbytes: int) -> None:
        """Memory that is not there is told of when it is asked for."""

    def region(self, nbytes: int) -> _CpuRegion:
        return _CpuRegion(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned))

    def leaves(self, device: torch.device) -> bool:
        return device.type != "cpu"

    def close(self) -> None:
        """The memory goes with whoever holds a region."""


@final
class _CpuRegion:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def read(self, begin: int, into: Tensor) -> None:
        into.copy_(self.memory[begin : begin + len(into)])

    def write(self, begin: int, source: Tensor) -> None:
        self.memory[begin : begin + len(source)].copy_(source)


@final
class DiskTier:
    """A file without a name in `folder`, or in the nearest folder above it that is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
        self._end = self._reserved = 0
        self._file = _told(self._folder, lambda: _nameless(self._folder))

    def reserve(self, nbytes: int) -> None:
        wanted = self._end + nbytes
        if wanted <= self._reserved:
            return

        def allocate() -> None:
            # A write beyond would be noticed too, but in the middle of a step.
            os.posix_fallocate(self._file, self._reserved, wanted - self._reserved)

        _told(self._folder, allocate, needed=wanted - self._reserved)
        self._reserved = wanted

    def region(self, nbytes: int) -> _DiskRegion:
        self.reserve(nbytes)
        begin, self._end = self._end, self._end + nbytes
        return _DiskRegion(self._file, begin, self._folder)

    def leaves(self, device: torch.device) -> bool:
        return True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@final
class _DiskRegion:
    memory = None

    def __init__(self, file: int, begin: int, folder: Path) -> None:
        self._file, self._begin, self._folder = file, begin, folder

    def read(self, begin: int, into: Tensor) -> None:
        host = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu", pin_memory=True)
        self._all(os.preadv, host, begin)
        if host is not into:
            into.copy_(host)

    def write(self, begin: int, source: Tensor) -> None:
        self._all(os.pwritev, source.cpu(), begin)

    def _all(self, move: Callable[[int, list[memoryview], int], int], host: Tensor, begin: int) -> None:
        """Both calls may do less than they were asked to."""
        view, offset = _memory(host), self._begin + begin
        while view:
            count = _told(self._folder, functools.partial(move, self._file, [view], offset))
            assert count > 0, "a region is written before it is read"
            view, offset = view[count:], offset + count


def _memory(host: Tensor) -> memoryview:
    """By its address: torch holds memory that numpy has seen for unfit to be resized ever after."""
    return memoryview((ctypes.c_ubyte * len(host)).from_address(host.data_ptr())).cast("B")


def _nameless(folder: Path) -> int:
    """A file that is gone when the process is, kill -9 included."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (AttributeError, OSError) as error:
        # Not every system or file system knows files without a name.
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    file, name = tempfile.mkstemp(prefix="gpipe-offload-", dir=folder)
    Path(name).unlink()
    return file


def _told(folder: Path, act: Callable[[], Result], needed: int = 0) -> Result:
    """What `act` gives; a failure of the disk is a ResourceError that says where."""
    try:
        return act()
    except OSError as error:
        wanted = f"; {needed:,} bytes are needed, {_free(folder)} are free" if needed else ""
        raise ResourceError(
            f"{folder}: the offloaded model cannot be kept there: {error.strerror}{wanted}; make room, or choose a "
            "run_dir on another disk"
        ) from error


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        return "unknown how many"
