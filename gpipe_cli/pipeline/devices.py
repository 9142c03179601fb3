"""Which devices a pipe's partitions live on.

Decides the default (all CUDA devices, or one CPU worker per partition) and what counts as too few.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["Device", "choose_devices", "denies_move"]

Device = int | str | torch.device


def choose_devices(devices: Iterable[Device] | None, partitions: int, *, repeats: bool) -> list[torch.device]:
    """One device per worker; fewer than partitions only if the schedule `repeats` them."""
    if devices is not None:
        chosen = [_device(device) for device in devices]
    elif torch.cuda.is_available():
        chosen = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    else:
        chosen = [torch.device("cpu")] * partitions
    needed = min(partitions, 1) if repeats else partitions
    if len(chosen) < needed:
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(chosen)}, partitions: {partitions})"
        )
    return chosen[:partitions]


def _device(device: Device) -> torch.device:
    # Numbers count the GPUs of a machine; on one without any, all they can mean is a worker each.
    if isinstance(device, int) and not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device(device)


def denies_move(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether arguments of `Module.to` ask for another device: a dtype alone may pass."""
    if kwargs.keys() & {"device", "tensor", "other"}:
        return True
    moving = (str, int, torch.device, torch.Tensor)
    return any(isinstance(argument, moving) and not isinstance(argument, bool) for argument in args)
