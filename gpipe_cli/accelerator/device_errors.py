"""Report memory that ran out as a ResourceError: on which device, how much was asked for and is free, what to try.

torch raises its own class for accelerators, but a bare RuntimeError for the CPU, which only its text identifies. The
system raises an OSError, or an ImportError while loading a library. Imports torch only for errors of torch: its own
import may be what fails. An accelerator reports an error of a kernel at a later call than the one that queued it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpipe_cli.errors import ResourceError
from gpipe_cli.values import format_bytes

if TYPE_CHECKING:
    import torch

DEVICE_ERROR = re.compile(
    r"\b(?:CUDA|HIP|XPU|NPU|MPS) error\b(?!: out of memory)|device-side assert", re.IGNORECASE
)
SYNCHRONOUS_LAUNCHES = {"cuda": "CUDA_LAUNCH_BLOCKING=1", "npu": "ASCEND_LAUNCH_BLOCKING=1"}
"""Environment variables that make the host wait for every kernel, by device type."""
ROCM_SYNCHRONOUS_LAUNCHES = "AMD_SERIALIZE_KERNEL=3"
STEP_HINT = "try more chunks, checkpoint=always, balance=size or more devices"
EVAL_HINT = "try more eval_chunks or a smaller batch_size"
CPU_ERROR = re.compile(r"DefaultCPUAllocator: .*?memory: you tried to allocate (\d+) bytes")
REQUEST = re.compile(r"Tried to allocate ([\d.]+) ?(\w+)")
DRIVER_ERROR = re.compile(r"MPS backend out of memory|\b(?:CUDA|HIP|XPU|NPU) error: out of memory")
FREE = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
INDEX = re.compile(r"\b[GNX]PU (\d+)\b")
"""How the messages of CUDA, ROCm, XPU and NPU name the device."""
OTHER_ERRORS = (
    "Cannot allocate memory",
    "failed to map segment",
    "can't start new thread",
    "Storage size calculation overflowed",
    "integer multiplication overflow",
)
"""Texts of failed system calls as Python and torch report them, and of tensors larger than any memory."""


@contextmanager
def report_out_of_memory(
    doing: str = "", hint: str = STEP_HINT, partitions: Mapping[int, torch.device] | None = None
) -> Iterator[None]:
    """Turn a failed allocation inside into a ResourceError with the notes of the original error.

    An error of a kernel gets a note instead: no memory is missing, but its place is as unsure here as anywhere.
    partitions: the device of each by its index, to name those on the device that is full.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        request = _failed_request(error)
        if request is None:
            note_kernel_error(error)
            raise
        notes = getattr(error, "__notes__", ())
        place = _place(error, notes, partitions or {})
        out_of_memory = ResourceError(f"out of memory{doing and f' while {doing}'}{place}{request}; {hint}")
        for note in notes:
            out_of_memory.add_note(note)
        raise out_of_memory from error


def is_out_of_memory(error: BaseException) -> bool:
    return _failed_request(error) is not None


@contextmanager
def note_device(doing: str, device: torch.device) -> Iterator[None]:
    """Note on an error what was done, and on which device."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"while {doing}{on_device(device, error)}")
        raise


def on_device(device: torch.device, error: BaseException) -> str:
    """` on cuda:1`, with its free memory if `error` says that memory ran out; empty for a CPU.

    To be called where the error is raised: when it has reached the caller, memory is free again.
    """
    if device.type == "cpu":
        return ""
    return f" on {_memory_of(device, error) if is_out_of_memory(error) else device}"


def _memory_of(device: torch.device, error: BaseException) -> str:
    """`cuda:1 (0.5GiB of 16GiB free)`; only the name if torch cannot tell how much is free."""
    from gpipe_cli.accelerator.devices import free_and_total_bytes

    # The message is older: by now temporaries of the operator that failed are free again.
    if match := FREE.search(str(error)):
        return f"{device} ({match[2]} of {match[1]} free)"
    facts = free_and_total_bytes(device)
    if facts is None:
        return str(device)
    return f"{device} ({format_bytes(facts[0])} of {format_bytes(facts[1])} free)"


def _place(error: BaseException, notes: Sequence[str], partitions: Mapping[int, torch.device]) -> str:
    """` on cuda:1 (0.5GiB of 16GiB free), which holds partition 1`; empty if a note names the device already."""
    device = _full_device(error) if _is_of_accelerator(error) else None
    if device is None or any(re.search(rf"{device}\b", note) for note in notes):
        return ""
    own = [str(index) for index, each in partitions.items() if each == device]
    holds = f", which holds partition{'s' if len(own) > 1 else ''} {', '.join(own)}" if own else ""
    return f" on {_memory_of(device, error)}{holds}"


def _full_device(error: BaseException) -> torch.device | None:
    """The device that the message names, or the only one there is."""
    from gpipe_cli.accelerator.devices import accelerators

    devices = accelerators()
    if match := INDEX.search(str(error)):
        return next((device for device in devices if device.index == int(match[1])), None)
    return devices[0] if len(devices) == 1 else None


def _is_of_accelerator(error: BaseException) -> bool:
    # torch's own class, or the driver's error: of pinned memory, or outside of torch's allocator.
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and DRIVER_ERROR.search(str(error)) is not None
    )


def _failed_request(error: BaseException) -> str | None:
    """What could not be allocated, as text that may be empty; None if the error is not about memory."""
    if isinstance(error, MemoryError):
        return ""
    if isinstance(error, OSError):
        return "" if error.errno == errno.ENOMEM else None
    text = str(error)
    if match := CPU_ERROR.search(text):
        return f": cannot allocate {int(match[1]):,} bytes"
    if _is_of_accelerator(error):
        match = REQUEST.search(text)
        return f": cannot allocate {match[1]} {match[2]}" if match else ""
    return next((f": {known}" for known in OTHER_ERRORS if known in text), None)


def note_kernel_error(error: BaseException) -> None:
    """Note on an error that a device has raised where to look for its cause; once, and on no other error."""
    if not isinstance(error, RuntimeError) or DEVICE_ERROR.search(str(error)) is None:
        return
    note = "the device reports errors of its kernels at a later call: the cause may be an earlier layer or action"
    switch = _synchronous_launches()
    if switch is not None:
        note += f"; to see which, run it again with {switch} in the environment"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _synchronous_launches() -> str | None:
    import torch

    if torch.version.hip is not None:
        return ROCM_SYNCHRONOUS_LAUNCHES
    kind = torch.accelerator.current_accelerator()
    return SYNCHRONOUS_LAUNCHES.get("cuda" if kind is None else kind.type)
