"""Errors of kernels: an accelerator reports them at a later call than the one that queued the kernel.

After such an error the process cannot use the device any more. Imports torch only for errors of torch.
"""

from __future__ import annotations

import re

DEVICE_ERROR = re.compile(
    r"\b(?:CUDA|HIP|XPU|NPU|MPS) error\b(?!: out of memory)|device-side assert", re.IGNORECASE
)
SYNCHRONOUS_LAUNCHES = {"cuda": "CUDA_LAUNCH_BLOCKING=1", "npu": "ASCEND_LAUNCH_BLOCKING=1"}
"""Environment variables that make the host wait for every kernel, by device type."""
ROCM_SYNCHRONOUS_LAUNCHES = "AMD_SERIALIZE_KERNEL=3"


def note_kernel_error(error: BaseException) -> None:
    """Note on an error that a device has raised where to look for its cause; once, and on no other error."""
    if not isinstance(error, RuntimeError) or DEVICE_ERROR.search(str(error)) is None:
        return
    note = "the device reports errors of its kernels at a later call: the cause may be an earlier layer or action"
    switch = _synchronous_launches()
    if switch is not None:
        note += f"; to see which, run it again with {switch} in the environment"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _synchronous_launches() -> str | None:
    import torch

    if torch.version.hip is not None:
        return ROCM_SYNCHRONOUS_LAUNCHES
    kind = torch.accelerator.current_accelerator()
    return SYNCHRONOUS_LAUNCHES.get("cuda" if kind is None else kind.type)
