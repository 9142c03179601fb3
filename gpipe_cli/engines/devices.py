"""From `devices`, `partitions` and `threads` as written to what this machine has."""

from __future__ import annotations

import os
from typing import Any

import torch

from gpipe_cli.errors import ConfigError


def resolve_devices(devices: Any, partitions: int) -> list[torch.device]:
    """One device per partition: as listed, or the first of what `auto` finds."""
    if isinstance(devices, list):
        return [_device(one) for one in devices]
    found = available(devices)
    if len(found) == 1 and found[0].type == "cpu":
        return found * partitions
    return found[:partitions]


def available(devices: Any) -> list[torch.device]:
    """The devices a setting stands for; the CPU counts as one that can be shared."""
    if isinstance(devices, list):
        return [_device(one) for one in devices]
    gpus = torch.cuda.device_count()
    if devices == "auto":
        return [torch.device("cuda", index) for index in range(gpus)] or [torch.device("cpu")]
    if gpus == 0:
        return [torch.device("cpu")] * int(devices)
    if devices > gpus:
        raise ConfigError(f"devices={devices}: this machine has {gpus} CUDA devices")
    return [torch.device("cuda", index) for index in range(devices)]


def default_partitions(devices: Any) -> int:
    """One per device, 2 on a CPU."""
    found = available(devices)
    return 2 if found == [torch.device("cpu")] and not isinstance(devices, list) else len(found)


def set_threads(threads: Any, devices: list[torch.device]) -> int:
    """Intra-op threads of the process; several workers on one CPU get one each."""
    sharing = sum(device.type == "cpu" for device in devices) > 1
    count = (1 if sharing else os.cpu_count() or 1) if threads == "auto" else int(threads)
    torch.set_num_threads(count)
    return count


def _device(name: Any) -> torch.device:
    try:
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"devices: '{name}' is no device; write cpu, cuda:0 or a number") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"devices: '{name}' is not here, this machine has {torch.cuda.device_count()} CUDA devices"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"devices: '{name}' cannot be used; cpu and cuda can")
    return device
