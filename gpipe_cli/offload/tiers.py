"""Where slices are stored while they are not on a device: in host memory, or in a file.

A tier hands out regions of bytes; the tensors of one part of a slice lie together in a region, each at a multiple of
`ALIGNMENT` bytes, as in memory that torch allocates. The file has no name, so it is gone when the process is, however
that ends; its space is reserved in advance, and it is never synced, because no later process reads it. It is not
memory-mapped, because mapped pages count as memory of the process.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, TypeVar, final

import torch
from torch import Tensor

from gpipe_cli.accelerator.devices import reads_pinned_memory
from gpipe_cli.accelerator.streams import finish_queued, has_side_streams, record_event
from gpipe_cli.errors import ResourceError
from gpipe_cli.torch_internals.tensors import ALIGNMENT, exchanges_memory, is_dense, storage_of

TIERS = ("cpu", "disk")
HOST = torch.device("cpu")
Result = TypeVar("Result")


class Region(Protocol):
    """A fixed number of bytes."""

    @property
    def memory(self) -> Tensor | None:
        """The bytes, if they are in host memory."""

    def read(self, begin: int, into: Tensor) -> None:
        """Fill `into`, bytes on any device, from offset `begin`, in the order of the calling thread's stream."""

    def write(self, begin: int, source: Tensor) -> None:
        """Write `source`, bytes on any device, at offset `begin`, in the order of the calling thread's stream."""


class Tier(Protocol):
    def reserve(self, nbytes: int) -> None:
        """Prepare for regions of this many more bytes in total; raises ResourceError if there is no space for them."""

    def region(self, nbytes: int) -> Region: ...

    def frees_memory_of(self, device: torch.device) -> bool:
        """Whether bytes stored here take no memory of the device."""

    def close(self) -> None: ...


@final
class CpuTier:
    """Host memory; pinned for an accelerator, because only then are copies fast and need no host to wait for them.

    torch rounds pinned memory up to a power of two. So regions share blocks of such sizes, as large as what is left
    to store allows.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._pinned = reads_pinned_memory(devices)
        self._lock = threading.Lock()  # workers of several devices make regions of one block
        self._reserved = 0
        self._block = torch.empty(0, dtype=torch.uint8)
        """What is left of the block allocated last."""

    def reserve(self, nbytes: int) -> None:
        """Nothing is allocated yet: an allocation that fails raises when a region is made."""
        self._reserved += nbytes

    def region(self, nbytes: int) -> _CpuRegion:
        if not self._pinned:
            return _CpuRegion(torch.empty(nbytes, dtype=torch.uint8))
        with self._lock:
            if len(self._block) < nbytes:
                size = max(_power_of_two(nbytes), _power_of_two(self._reserved // 2 + 1))
                self._block = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            memory, self._block = self._block[:nbytes], self._block[nbytes:]
            self._reserved = max(0, self._reserved - nbytes)
        return _CpuRegion(memory)

    def frees_memory_of(self, device: torch.device) -> bool:
        return device.type != "cpu"

    def close(self) -> None:
        """Nothing to do: the memory is freed with its regions."""


def _power_of_two(nbytes: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, nbytes - 1).bit_length()


@final
class _CpuRegion:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def read(self, begin: int, into: Tensor) -> None:
        into.copy_(self.memory[begin : begin + len(into)], non_blocking=True)

    def write(self, begin: int, source: Tensor) -> None:
        self.memory[begin : begin + len(source)].copy_(source, non_blocking=True)


@final
class DiskTier:
    """A file without a name in `folder`, or in its nearest parent that exists."""

    def __init__(self, folder: Path) -> None:
        self._folder = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        self._end = self._reserved = 0
        self._lock = threading.RLock()  # workers of several devices make regions of one file
        self._staging = Staging()
        self._file = _disk_errors_as_resource_error(self._folder, lambda: _open_nameless_file(self._folder))

    def reserve(self, nbytes: int) -> None:
        with self._lock:
            wanted = self._end + nbytes
            if wanted <= self._reserved:
                return

            def allocate() -> None:
                # A write beyond the end would fail too, but in the middle of a step.
                os.posix_fallocate(self._file, self._reserved, wanted - self._reserved)

            _disk_errors_as_resource_error(self._folder, allocate, needed=wanted - self._reserved)
            self._reserved = wanted

    def region(self, nbytes: int) -> _DiskRegion:
        with self._lock:
            self.reserve(nbytes)
            begin, self._end = self._end, self._end + nbytes
        return _DiskRegion(self._file, begin, self._folder, self._staging)

    def frees_memory_of(self, device: torch.device) -> bool:
        return True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@final
class _DiskRegion:
    memory = None

    def __init__(self, file: int, begin: int, folder: Path, staging: Staging) -> None:
        self._file, self._begin, self._folder, self._staging = file, begin, folder, staging

    def read(self, begin: int, into: Tensor) -> None:
        if into.device.type == "cpu":
            self._transfer_all(os.preadv, into, begin)
        else:
            self._staging.load(into, lambda host, offset: self._transfer_all(os.preadv, host, begin + offset))

    def write(self, begin: int, source: Tensor) -> None:
        if source.device.type == "cpu":
            self._transfer_all(os.pwritev, source, begin)
        else:
            self._staging.store(
                source, lambda host, offset: self._transfer_all(os.pwritev, host, begin + offset)
            )

    def _transfer_all(
        self, move: Callable[[int, list[memoryview], int], int], host: Tensor, begin: int
    ) -> None:
        """preadv and pwritev may transfer fewer bytes than asked for."""
        # preadv and pwritev take the offset as an argument, so threads that share the descriptor need no lock on a
        # file position.
        view, offset = _memory(host), self._begin + begin
        while view:
            count = _disk_errors_as_resource_error(
                self._folder, functools.partial(move, self._file, [view], offset)
            )
            assert count > 0, "a region is written before it is read"
            view, offset = view[count:], offset + count


def _memory(host: Tensor) -> memoryview:
    """By address, not through numpy: torch would never resize memory again that it has shared with numpy."""
    return memoryview((ctypes.c_ubyte * len(host)).from_address(host.data_ptr())).cast("B")


def _open_nameless_file(folder: Path) -> int:
    """A file that the kernel removes with the process, even after kill -9."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (AttributeError, OSError) as error:
        # Not every file system supports O_TMPFILE.
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    file, name = tempfile.mkstemp(prefix="gpipe-offload-", dir=folder)
    Path(name).unlink()
    return file


def _disk_errors_as_resource_error(folder: Path, act: Callable[[], Result], needed: int = 0) -> Result:
    """Call `act`, and raise a ResourceError that names the folder if the disk fails."""
    try:
        return act()
    except OSError as error:
        space = f"; {needed:,} bytes are needed, {_free_bytes(folder)} are free" if needed else ""
        raise ResourceError(
            f"{folder}: the offloaded model cannot be stored there: {error.strerror}{space}; make room, or choose a "
            "run_dir on another disk"
        ) from error


def _free_bytes(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,}"
    except OSError:
        return "an unknown number"


STAGING_BYTES = 2**25
"""The size of one buffer: enough for the full speed of disks and links, and a power of two, because torch rounds
pinned memory up to one."""


@final
class Staging:
    """Pinned host memory through which bytes pass between a file and an accelerator.

    Two buffers for a whole tier, used in turn: the host fills one from the file while the device still copies the
    other. Each is given to one thread at a time, when the device is done with it.

    The host waits once for each piece of `STAGING_BYTES` that it reads from the device, and once before it overwrites
    a piece that the device has read.
    """

    def __init__(self, count: int = 2) -> None:
        self._free: SimpleQueue[_StagingBuffer] = SimpleQueue()
        for _ in range(count):
            self._free.put(_StagingBuffer())

    def load(self, into: Tensor, fill: Callable[[Tensor, int], None]) -> None:
        """Queue copies into memory of a device; `fill` writes the host's bytes from an offset on."""
        for begin, piece in _pieces(into):
            with self._buffer() as buffer:
                host = buffer.memory(piece.device)[: len(piece)]
                fill(host, begin)
                # Without side streams there is no event to wait for before the host writes this memory again.
                piece.copy_(host, non_blocking=has_side_streams(piece.device))
                buffer.copied = record_event(piece.device)

    def store(self, source: Tensor, drain: Callable[[Tensor, int], None]) -> None:
        """Copy from memory of a device; `drain` reads the host's bytes, which belong at an offset."""
        for begin, piece in _pieces(source):
            with self._buffer() as buffer:
                host = buffer.memory(piece.device)[: len(piece)]
                host.copy_(piece, non_blocking=True)
                finish_queued(piece.device)
                drain(host, begin)

    @contextmanager
    def _buffer(self) -> Iterator[_StagingBuffer]:
        buffer = self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)


def _pieces(memory: Tensor) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, len(memory), STAGING_BYTES):
        yield begin, memory[begin : begin + STAGING_BYTES]


@final
class _StagingBuffer:
    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self.copied: torch.Event | None = None
        """The end of the device's copy from this memory."""

    def memory(self, device: torch.device) -> Tensor:
        """Memory that the host may write; pinned if the device reads such memory."""
        if self._memory is None:
            pinned = reads_pinned_memory([device])
            self._memory = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=pinned)
        copied, self.copied = self.copied, None
        if copied is not None:
            copied.synchronize()
        return self._memory


@final
@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a tensor lies in a row of bytes, and its shape there."""

    begin: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int

    def view(self, memory: Tensor) -> Tensor:
        """The tensor, as a view of the bytes in `memory`."""
        flat = memory[self.begin : self.begin + self.nbytes].view(self.dtype)
        return flat.as_strided(self.size, self.stride)

    def placeholder(self, device: torch.device) -> Tensor:
        return placeholder(self.dtype, self.size, device)


def placeholder(dtype: torch.dtype, size: Sequence[int], device: torch.device) -> Tensor:
    """A tensor that takes no memory: one NaN, expanded, which no weight can be."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(size)


@final
class Layout:
    """Slots for tensors like those given, in their order."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.slots: list[TensorSlot] = []
        end = 0
        for tensor in tensors:
            # Strides decide which kernels run, so dense tensors keep theirs; one with holes is stored without them.
            dense = tensor.is_contiguous() or is_dense(tensor)
            stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
            slot = TensorSlot(end, tensor.dtype, tuple(tensor.shape), tuple(stride), tensor.nbytes)
            self.slots.append(slot)
            end += padded(slot.nbytes)
        self.nbytes = end


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as a row of bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@final
class StoredTensors:
    """Space on a tier for tensors like those given; `put` stores their values."""

    def __init__(self, tier: Tier, tensors: Sequence[Tensor]) -> None:
        self.layout = Layout(tensors)
        self.region = tier.region(self.layout.nbytes)
        memory = self.region.memory
        self._slots: dict[int, TensorSlot] = {}
        self.resting_tensors: list[Tensor] = []
        """What represents each tensor while it is not on its device: a view of host memory, or a placeholder."""
        for slot, tensor in zip(self.layout.slots, tensors, strict=True):
            if memory is not None and exchanges_memory(tensor.device):
                self.resting_tensors.append(slot.view(memory))
                continue
            device = HOST if exchanges_memory(tensor.device) else tensor.device
            self.resting_tensors.append(slot.placeholder(device))
            self._slots[storage_of(self.resting_tensors[-1])] = slot

    @property
    def has_placeholders(self) -> bool:
        return bool(self._slots)

    def put(self, index: int, value: Tensor) -> None:
        """Store a value, from whichever device it is on; the host has it on return."""
        slot = self.layout.slots[index]
        dense = value if value.stride() == slot.stride else value.contiguous()
        self.region.write(slot.begin, as_bytes(dense.detach().cpu()))

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors, in memory that their bytes were loaded to."""
        return [slot.view(memory) for slot in self.layout.slots]

    def get(self, resting: Tensor) -> Tensor | None:
        """Read the value of one of the placeholders; None for any other tensor."""
        slot = self._slots.get(storage_of(resting))
        if slot is None:
            return None
        value = torch.empty(slot.nbytes, dtype=torch.uint8)
        self.region.read(slot.begin, value)
        return value.view(slot.dtype).as_strided(slot.size, slot.stride)
