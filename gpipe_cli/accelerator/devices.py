"""The devices of this machine, and those that hold the partitions of a pipe.

By default a pipe uses all accelerators, or one CPU worker per partition.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

Device = int | str | torch.device


def choose_devices(devices: Iterable[Device] | None, partitions: int, *, repeats: bool) -> list[torch.device]:
    """One device per worker; fewer than partitions only if the schedule `repeats` them."""
    if devices is not None:
        chosen = [device_here(device) for device in devices]
    else:
        chosen = _accelerators() or [torch.device("cpu")] * partitions
    needed = min(partitions, 1) if repeats else partitions
    if len(chosen) < needed:
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(chosen)}, partitions: {partitions})"
        )
    return chosen[:partitions]


def device_here(device: Device) -> torch.device:
    """The device as torch knows it, if this machine has it; a number counts the accelerators."""
    accelerators = _accelerators()
    if isinstance(device, int) and 0 <= device < len(accelerators):
        return accelerators[device]
    if not isinstance(device, int):
        try:
            known = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"device {device!r} does not exist; write 'cpu', 'cuda:0' or a number"
            ) from error
        if known.type in ("cpu", "meta") or torch.device(known.type, known.index or 0) in accelerators:
            return known
    cure = f"write 0 to {len(accelerators) - 1}" if accelerators else "write 'cpu' for a worker on the CPU"
    raise IndexError(
        f"device {device!r} is not here: this machine has {len(accelerators)} accelerators; {cure}"
    )


def _accelerators() -> list[torch.device]:
    """All of this machine."""
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    return [] if kind is None else [torch.device(kind.type, index) for index in range(count)]


def denies_move(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether arguments of `Module.to` ask for another device: a dtype alone may pass."""
    if kwargs.keys() & {"device", "tensor", "other"}:
        return True
    moving = (str, int, torch.device, torch.Tensor)
    return any(isinstance(argument, moving) and not isinstance(argument, bool) for argument in args)
