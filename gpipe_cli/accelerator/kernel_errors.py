"""Errors of kernels: an accelerator reports them at a later call than the one that queued the kernel.

After one the process cannot use the device any more, so nothing may be saved from it.
"""

from __future__ import annotations

import re

import torch

from gpipe_cli.accelerator.memory import is_out_of_memory

SYNCHRONOUS_LAUNCHES = {"cuda": "CUDA_LAUNCH_BLOCKING=1", "npu": "ASCEND_LAUNCH_BLOCKING=1"}
"""Environment variables that make the host wait for every kernel, by device type."""
ROCM_SYNCHRONOUS_LAUNCHES = "AMD_SERIALIZE_KERNEL=3"
DEVICE_ERROR = re.compile(r"\b(?:CUDA|HIP|XPU|NPU|MPS|\w+ runtime) error\b|device-side assert", re.IGNORECASE)


def kernel_error_note(error: BaseException) -> str | None:
    """What to do about an error that the device, not the call that raised, has caused; None for any other error."""
    raised_by_device = isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and DEVICE_ERROR.search(str(error)) is not None
    )
    if not raised_by_device or is_out_of_memory(error):
        return None
    note = (
        "the device runs kernels after the call that queued them: the cause may be an earlier layer or action"
    )
    switch = _synchronous_launches()
    return note if switch is None else f"{note}; run it again with {switch} in the environment to see which"


def _synchronous_launches() -> str | None:
    kind = torch.accelerator.current_accelerator()
    if torch.version.hip is not None:
        return ROCM_SYNCHRONOUS_LAUNCHES
    return SYNCHRONOUS_LAUNCHES.get("cuda" if kind is None else kind.type)
