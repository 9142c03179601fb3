"""torch's fake tensors: tensors without values and memory.

Unlike meta tensors they claim to be on the CPU, so torch chooses the kernels it would choose for real ones. What
attention saves for backward depends on that. torch keeps them private.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

# torch logs a traceback of every operator that refuses its inputs, and raises the error too.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Raised by an operation that needs values, or has no implementation without them."""


def fake_tensors() -> AbstractContextManager[object]:
    """Inside, every operation of this thread gives a fake tensor; real ones may be among its inputs.

    It may be entered again, for tensors made the time before: torch does not let tensors of two modes meet.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_twin(tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """For use inside `fake_tensors`: one like `tensor`, on `device`."""
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)
