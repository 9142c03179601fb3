"""Which backend of torch.distributed carries the tensors of which device.

An accelerator has a backend of its own (NCCL, XCCL, ...), which torch or an extension of torch registers. Tensors on
the CPU always go through gloo.
"""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from gpipe_cli.accelerator.devices import current_device, is_accelerator
from gpipe_cli.errors import ConfigError

GLOO = "gloo"


def backends_for(device: torch.device) -> str:
    """What `init_process_group` needs to know if the tensors of this process are on the device.

    A device without a backend is refused. gloo would need a copy of every tensor on the CPU, and torch's schedules,
    which send the tensors, make none.
    """
    if not is_accelerator(device):
        return GLOO
    cure = "use engine=threads, or devices=[cpu,...]"
    try:
        name = distributed.get_default_backend_for_device(device)
    except ValueError as error:
        raise ConfigError(
            f"devices: torch.distributed has no backend for the type '{device.type}'; {cure}"
        ) from error
    if not distributed.is_backend_available(name):
        raise ConfigError(
            f"devices: '{device}' needs the backend {name}, which this build of torch does not have; {cure}"
        )
    return f"cpu:{GLOO},{device.type}:{name}"


def with_cpu_backend(config: str) -> str | None:
    """The backends of a group, such as `cuda:nccl`, and one for the CPU; None if the group has one."""
    return None if "cpu" in _backends(config) else f"cpu:{GLOO},{config}"


def device_of(group: ProcessGroup) -> torch.device:
    """Where the tensors of a group are: the current accelerator if the group has a backend for it, else the CPU."""
    device = current_device()
    backend = _backends(distributed.get_backend_config(group)).get(device.type, GLOO)
    # gloo is listed for some accelerators too, but supports few of the operations there.
    return device if backend != GLOO else torch.device("cpu")


def _backends(config: str) -> dict[str, str]:
    """By device type, from a text such as `cpu:gloo,cuda:nccl`."""
    pairs = (pair.partition(":") for pair in config.split(","))
    return {device_type: name for device_type, _, name in pairs}
