"""The devices of this machine: what `devices` and `threads` of a configuration or of a pipe stand for, what a device
tells about itself, and the memory counters that torch's allocators keep for this process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from gpipe_cli.errors import ConfigError

Device = int | str | torch.device


def choose_devices(devices: Iterable[Device] | None, partitions: int, *, repeats: bool) -> list[torch.device]:
    """One device per worker; fewer than partitions only if the schedule `repeats` them."""
    if devices is not None:
        chosen = [device_here(device) for device in devices]
    else:
        chosen = accelerators() or [torch.device("cpu")] * partitions
    needed = min(partitions, 1) if repeats else partitions
    if len(chosen) < needed:
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(chosen)}, partitions: {partitions})"
        )
    return chosen[:partitions]


def device_here(device: Device) -> torch.device:
    """The device as its tensors name it, if this machine has it; a number counts the accelerators.

    An accelerator without an index is the calling thread's current one. Tensors give their device with an index, so
    two names of one device would be taken for two devices.
    """
    present = accelerators()
    if isinstance(device, int) and 0 <= device < len(present):
        return present[device]
    if not isinstance(device, int):
        try:
            known = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"device {device!r} does not exist; write 'cpu', {_example(present)} or a number"
            ) from error
        if not is_accelerator(known):
            return torch.device(known.type)
        index: int | None = known.index
        if index is None and present and known.type == present[0].type:
            return present[torch.accelerator.current_device_index()]
        if known in present:
            return known
    kind = f" of type {present[0].type}" if present else ""
    hint = f"write 0 to {len(present) - 1}" if present else "write 'cpu' for a worker on the CPU"
    raise IndexError(
        f"device {device!r} does not exist: this machine has {len(present)} accelerators{kind}; {hint}"
    )


def _example(present: list[torch.device]) -> str:
    return f"'{present[0] if present else 'cuda:0'}'"


def is_accelerator(device: torch.device) -> bool:
    """Whether the device has memory of its own, and runs kernels after the call that queued them has returned."""
    return device.type not in ("cpu", "meta")


def reads_pinned_memory(devices: Iterable[torch.device]) -> bool:
    """Whether one of the devices copies from pinned memory of the host by itself; MPS has no such memory."""
    return any(is_accelerator(device) and device.type != "mps" for device in devices)


def accelerators() -> list[torch.device]:
    """All accelerators of this machine, of the one kind that torch was built for."""
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    return [] if kind is None else [torch.device(kind.type, index) for index in range(count)]


def device_name(device: torch.device) -> str:
    """The name of an accelerator's model, or its type if torch cannot tell."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def current_device() -> torch.device:
    """The accelerator that new tensors of this thread go to if it is given by its type alone, or the CPU."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def asks_for_device(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether arguments of `Module.to` ask for another device: a dtype alone may pass."""
    if kwargs.keys() & {"device", "tensor", "other"}:
        return True
    moving = (str, int, torch.device, torch.Tensor)
    return any(isinstance(argument, moving) and not isinstance(argument, bool) for argument in args)


def resolve_devices(devices: Any, partitions: int) -> list[torch.device]:
    """The devices of the partitions: `auto` takes as many as there are partitions, and shares a CPU."""
    available = available_devices(devices)
    if devices != "auto":
        return available
    return available * partitions if available[0].type == "cpu" else available[:partitions]


def available_devices(devices: Any) -> list[torch.device]:
    """The devices that a setting stands for; for `auto` a CPU counts once."""
    if isinstance(devices, list):
        return [_configured_device(device, devices) for device in devices]
    present = accelerators()
    if devices == "auto":
        return present or [torch.device("cpu")]
    if not present:
        return [torch.device("cpu")] * int(devices)
    if devices > len(present):
        raise ConfigError(
            f"devices={devices}: this machine has {len(present)} accelerators; give at most that many"
        )
    return present[:devices]


def default_partitions(devices: Any, replicas: int = 1) -> int:
    """One per device of a replica; 2 on the CPU if `devices` is auto."""
    available = available_devices(devices)
    return 2 if devices == "auto" and available[0].type == "cpu" else max(1, len(available) // replicas)


def available_cores() -> int:
    """The cores that this process may use; a container or `taskset` may limit them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(threads: Any, devices: Sequence[torch.device]) -> int:
    """Set the intra-op threads of the process."""
    count = intra_op_threads(devices, available_cores()) if threads == "auto" else int(threads)
    torch.set_num_threads(count)
    return count


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """So many intra-op threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def intra_op_threads(devices: Sequence[torch.device], cores: int) -> int:
    """How many each worker gets: all cores, or one if several workers share the CPU."""
    return 1 if sum(device.type == "cpu" for device in devices) > 1 else cores


def _configured_device(device: Any, devices: list[Any]) -> torch.device:
    try:
        parsed = device_here(device)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"devices={_shown(devices)}: {error}") from error
    if parsed.type == "meta":
        raise ConfigError(
            f"devices={_shown(devices)}: device 'meta' computes nothing; write 'cpu', "
            f"{_example(accelerators())} or a number"
        )
    return parsed


def _shown(devices: list[Any]) -> str:
    return f"[{','.join(map(str, devices))}]"


def compute_capability(device: torch.device) -> str | None:
    """The version of the hardware's instruction set, such as 8.0; None where the kind of device has none."""
    capability = getattr(torch.get_device_module(device), "get_device_capability", None)
    value = capability(device) if is_accelerator(device) and capability is not None else None
    return ".".join(map(str, value)) if isinstance(value, tuple) else None


def free_and_total_bytes(device: torch.device) -> tuple[int, int] | None:
    """The memory of an accelerator, counted over all processes; None where torch cannot ask for it."""
    try:
        free, total = torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError):  # a kind of device without such a counter
        return None
    return free, total


def free_host_bytes() -> int:
    """The memory of this machine that processes can still get, its disk cache included; all of it if unknown."""
    with suppress(OSError):
        if match := re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            return 1024 * int(match[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def has_peer_access(source: torch.device, destination: torch.device) -> bool | None:
    """Whether copies between two accelerators avoid the host; None where torch cannot tell."""
    ask = getattr(torch.get_device_module(source), "can_device_access_peer", None)
    return None if ask is None else bool(ask(source, destination))


PEAK = "allocated_bytes.all.peak"


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes that tensors of this process took at once on the device since `reset_peaks`.

    None on a CPU, and on a kind of accelerator whose allocator keeps no statistics, such as MPS.
    """
    if not is_accelerator(device):
        return None
    try:
        peak = torch.accelerator.memory_stats(device).get(PEAK)
    except (RuntimeError, NotImplementedError):
        return None
    return None if peak is None else int(peak)


def memory_snapshot(devices: Iterable[torch.device]) -> list[dict[str, Any]] | None:
    """Every segment of memory that torch's allocator holds on the GPUs, and its blocks; None without a GPU."""
    if all(device.type != "cuda" for device in devices):
        return None
    snapshot: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return snapshot


def reset_peaks(devices: Iterable[torch.device]) -> None:
    """Count the peaks of `devices` from now on."""
    for device in {device for device in devices if peak_bytes(device) is not None}:
        torch.accelerator.reset_peak_memory_stats(device)
