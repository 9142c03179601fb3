"""From `devices`, `partitions` and `threads` as written to what this machine has."""

from __future__ import annotations

import os
from typing import Any

import torch

from gpipe_cli.errors import ConfigError


def resolve_devices(devices: Any, partitions: int) -> list[torch.device]:
    """The devices of so many partitions: `auto` takes as many as there are partitions, and shares a CPU."""
    found = available(devices)
    if devices != "auto":
        return found
    return found * partitions if found[0].type == "cpu" else found[:partitions]


def available(devices: Any) -> list[torch.device]:
    """The devices a setting stands for; for `auto` a CPU counts once."""
    if isinstance(devices, list):
        return [_device(one) for one in devices]
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if devices == "auto":
        return gpus or [torch.device("cpu")]
    if not gpus:
        return [torch.device("cpu")] * int(devices)
    if devices > len(gpus):
        raise ConfigError(
            f"devices={devices}: this machine has {len(gpus)} CUDA devices; give at most that many"
        )
    return gpus[:devices]


def default_partitions(devices: Any, replicas: int = 1) -> int:
    """One per device of a replica, 2 on a CPU that was not asked for by number or name."""
    found = available(devices)
    return 2 if devices == "auto" and found[0].type == "cpu" else max(1, len(found) // replicas)


def available_cores() -> int:
    """Those this process may use, which a container or `taskset` may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(threads: Any, devices: list[torch.device]) -> int:
    """Intra-op threads of the process; several workers on one CPU get one each."""
    sharing = sum(device.type == "cpu" for device in devices) > 1
    count = (1 if sharing else available_cores()) if threads == "auto" else int(threads)
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
