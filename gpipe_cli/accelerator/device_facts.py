"""What a device says about itself: its instruction set, its memory, and which other devices it reads directly."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from gpipe_cli.accelerator.devices import is_accelerator


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
