"""torch's CUDA sanitizer, which reports accesses to a tensor from two streams that nothing orders.

It is a dispatch mode, and a pipe lets its workers and their backward enter the caller's modes, so it sees their
kernels too. It notes each kernel on the current stream of the current device, and streams of different devices may
have the same number: use it for the streams of one device. It cannot be turned off completely, so give it a process of
its own.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

import torch


def offers_sanitizer(device: torch.device) -> bool:
    """Whether torch can trace this device: builds for CUDA and ROCm can."""
    return device.type == "cuda" and (torch.version.cuda or torch.version.hip) is not None


def find_races(work: Callable[[], object]) -> list[str]:
    """Run the work; what the sanitizer reports about it, one line per race."""
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()  # type: ignore[no-untyped-call]
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it prints what it raises, with long stack traces
            work()
    except _sanitizer.CUDASanitizerErrors as error:
        return [str(race).partition("\n")[0] for race in error.errors]
    finally:
        _sanitizer.cuda_sanitizer.disable()  # type: ignore[no-untyped-call]
    return []
