"""A simulated accelerator of four devices: streams, events, memory limits, and a detector of stream races.

Its kernels are the CPU's, so results equal the CPU's to the bit. `load` adds the devices to this process for good; do
so before the first backward, when autograd starts a thread per device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from tests.accelerator.simulator.build import Build, compiled, missing_requirement
from tests.accelerator.simulator.device_module import DeviceModule, pose_as_cuda

__all__ = ["Build", "Simulator", "load", "loaded", "missing_requirement"]

OWN_KERNELS = {
    "empty.memory_format",
    "empty_strided",
    "copy_",
    "_copy_from",
    "_copy_from_and_resize",
    "record_stream",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
}
"""Operators that csrc implements for the devices."""
CHOOSES_BY_DEVICE = ["convolution", "convolution_backward", "_convolution"]
"""Composite operators that choose another algorithm for an accelerator than for the CPU."""

_loaded: Simulator | None = None


class Simulator:
    """What tests ask the simulated accelerator, and how they set it up."""

    def __init__(self, build: Build, extension: ModuleType) -> None:
        self.build = build
        self.devices = [torch.device(build, index) for index in range(extension.device_count)]
        self._extension = extension

    def races(self) -> list[str]:
        """Pairs of accesses to the same memory that nothing orders, since the last `reset`."""
        races: list[str] = self._extension.races()
        return races

    def host_syncs(self) -> list[str]:
        """Where the host waited for a device since the last `reset`."""
        syncs: list[str] = self._extension.host_syncs()
        return syncs

    def is_idle(self) -> bool:
        """Whether the host has waited for all kernels, so that reading a clock measures them."""
        idle: bool = self._extension.host_knows_all()
        return idle

    def reset(self) -> None:
        """Forget races and host synchronizations."""
        self._extension.reset()

    @contextmanager
    def memory_limit(self, nbytes: int) -> Iterator[None]:
        """The memory of each device."""
        self._extension.set_memory_limit(nbytes)
        try:
            yield
        finally:
            self._extension.set_memory_limit(0)

    @contextmanager
    def asynchronous(self, seed: int = 0, microseconds: int = 150) -> Iterator[None]:
        """Kernels run later, in a thread per stream; memory that nobody wrote or that was freed reads as NaN.

        microseconds: how late a kernel starts at most.
        """
        self._extension.set_asynchronous(True, seed, microseconds)
        try:
            yield
        finally:
            for device in self.devices:
                torch.accelerator.synchronize(device)
            self._extension.set_asynchronous(False, seed, microseconds)


def loaded() -> Simulator | None:
    """The simulator that `load` has added to this process."""
    return _loaded


def load(build: Build) -> Simulator:
    """Add the simulated devices to this process."""
    global _loaded
    if _loaded is None:
        extension: Any = compiled(build)
        generators = [extension.default_generator(index) for index in range(extension.device_count)]
        if build == "cuda":
            pose_as_cuda(generators)
        else:
            torch.utils.rename_privateuse1_backend(build)
            torch._register_device_module(build, DeviceModule(build, generators))
        extension.take_over(_operators_to_take_over())
        _loaded = Simulator(build, extension)
    if _loaded.build != build:
        raise RuntimeError(
            f"this process has the simulated accelerator {_loaded.build}; one process holds one"
        )
    return _loaded


def _operators_to_take_over() -> list[str]:
    names = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    composite = (
        "CompositeImplicitAutograd",
        "CompositeExplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
    )

    def has_kernel(name: str, key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)

    both = [
        name for name in names if has_kernel(name, "CPU") and any(has_kernel(name, key) for key in composite)
    ]
    return sorted({*both, *CHOOSES_BY_DEVICE} - OWN_KERNELS)
