"""Splits a sequence into partitions: which layers are in which, and which skips cross between them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from typing import final

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.device_errors import note_device
from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.pipeline.module_state import tensors_in
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.sequential.deferred import load_parameters
from gpipe_cli.skip.skippable import SkipRoute, skip_layout
from gpipe_cli.torch_internals.autograd import has_hooks


@final
class PartitionModule(nn.Sequential):
    """Some layers of the sequence, under the names they have there."""

    def __init__(self, named: list[tuple[str, nn.Module]], layers: tuple[Layer, ...]) -> None:
        super().__init__(OrderedDict(named))
        self.layer_names = tuple(layer.name for layer in layers)
        """The display names, which may contain dots; the name of a child cannot."""


def partition_modules(
    module: nn.Sequential, layers: tuple[Layer, ...], balance: Sequence[int]
) -> nn.ModuleList:
    """The partitions as sequences of the same layers under the same names."""
    named = list(module.named_children())
    return nn.ModuleList(
        PartitionModule(named[end - length : end], layers[end - length : end])
        for end, length in zip(accumulate(balance), balance, strict=True)
    )


def move_to_devices(
    modules: Iterable[nn.Module],
    devices: Sequence[torch.device],
    move: Callable[[nn.Module, torch.device], object] = nn.Module.to,
) -> None:
    """Move each partition to its device, and what several share to the device of the first that uses it.

    Parameters that are still in files are read here, each straight to its device.
    """
    partitions = list(modules)
    for index, module in enumerate(partitions):
        device = devices[index % len(devices)]
        with note_device(f"loading partition {index}", device):
            load_parameters([module], device)
    uses: dict[Tensor, dict[tuple[nn.Module, str], None]] = {}
    for part, name, tensor in chain.from_iterable(map(tensors_in, partitions)):
        uses.setdefault(tensor, {})[part, name] = None
    # The last one first: where partitions share a tensor, the first of them then decides.
    for index, module in reversed(list(enumerate(partitions))):
        device = devices[index % len(devices)]
        with note_device(f"moving partition {index}", device):
            move(module, device)
    # torch moves the buffers of each module on their own, and on some accelerators the parameters too.
    for original, ((owner, name), *others) in uses.items():
        shared = getattr(owner, name)
        if shared is not original and has_hooks(original):
            raise ValueError(
                f"parameter '{name}' of {type(owner).__name__} has hooks, which torch drops when it moves a parameter "
                f"to {shared.device.type}; register them on the parameters of the pipe"
            )
        for other, other_name in others:
            if getattr(other, other_name) is not shared:
                setattr(other, other_name, shared)


def make_partitions(
    modules: nn.ModuleList, layers: tuple[Layer, ...], devices: Sequence[torch.device]
) -> list[Partition]:
    """Assign partitions to `devices` round robin."""
    layout = skip_layout(list(modules))
    balance = [len(list(module.children())) for module in modules]
    ends = list(accumulate(balance))
    uses = Counter(part for module in modules for part in module.modules())
    return [
        Partition(
            index=index,
            layers=layers[ends[index] - length : ends[index]],
            device=devices[index % len(devices)],
            receives=_neighbour_first(layout.receives[index], index - 1),
            sends=_neighbour_first(layout.sends[index], index + 1),
            is_last=index == len(balance) - 1,
            shares_modules=any(uses[part] > 1 for part in modules[index].modules()),
        )
        for index, length in enumerate(balance)
    ]


def _neighbour_first(routes: Sequence[SkipRoute], neighbour: int) -> tuple[SkipRoute, ...]:
    """Skips to the neighbour travel with the value, the others by partition."""
    return tuple(
        sorted(routes, key=lambda route: (route.partition != neighbour, route.partition, route.name))
    )


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers only, for a module whose parameters are offloaded."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            setattr(owner, name, buffer.to(device))
