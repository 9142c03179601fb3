"""The memory counters of devices, as torch's allocators keep them for this process."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gpipe_cli.accelerator.devices import is_accelerator

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


def reset_peaks(devices: Iterable[torch.device]) -> None:
    """Count the peaks of `devices` from now on."""
    for device in {device for device in devices if peak_bytes(device) is not None}:
        torch.accelerator.reset_peak_memory_stats(device)
