"""The functions of `torch.cuda`, or of the module of a PrivateUse1 device, that torch and models call."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch


class DeviceModule(ModuleType):
    """`torch.<name>` of a simulated device."""

    def __init__(self, name: str, generators: Sequence[torch.Generator]) -> None:
        super().__init__(f"torch.{name}")
        self.__dict__.update(_functions(name, generators))


def pose_as_cuda(generators: Sequence[torch.Generator]) -> None:
    """Replace functions of `torch.cuda`, which a CPU build of torch has without their C++ part."""
    functions = _functions("cuda", generators)
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
        module.__dict__.update(functions)


def _functions(name: str, generators: Sequence[torch.Generator]) -> dict[str, Any]:
    """generators: the default generator of each device."""
    accelerator = torch.accelerator

    def index(device: Any = None) -> int:
        if device is None:
            return accelerator.current_device_index()
        return device if isinstance(device, int) else torch.device(device).index or 0

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    return {
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: len(generators),
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(index(device)),
        "device": lambda device: accelerator.device_index(index(device)),
        "get_device_name": lambda device=None: f"Simulated {name}",
        "get_device_capability": lambda device=None: (8, 0),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda including_emulation=True: True,
        "can_device_access_peer": lambda device, peer: True,
        "current_stream": lambda device=None: accelerator.current_stream(index(device)),
        "default_stream": lambda device=None: torch.Stream(torch.device(name, index(device)), stream_id=0),
        "set_stream": accelerator.set_stream,
        "stream": lambda stream: stream,
        "Stream": lambda device=None, **_: torch.Stream(torch.device(name, index(device))),
        "Event": lambda enable_timing=False, **_: torch.Event(name, enable_timing=enable_timing),
        "synchronize": lambda device=None: accelerator.synchronize(index(device)),
        "memory_allocated": lambda device=None: accelerator.memory_allocated(index(device)),
        "max_memory_allocated": lambda device=None: accelerator.max_memory_allocated(index(device)),
        "reset_peak_memory_stats": lambda device=None: accelerator.reset_peak_memory_stats(index(device)),
        "mem_get_info": lambda device=None: accelerator.get_memory_info(index(device)),
        "empty_cache": accelerator.empty_cache,
        "manual_seed": lambda seed: generators[index()].manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: generators[index(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[index(device)].set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": lambda states: [
            generator.set_state(state) for generator, state in zip(generators, states, strict=True)
        ],
        "default_generators": tuple(generators),
    }
