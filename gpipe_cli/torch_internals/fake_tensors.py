"""torch's fake tensors: tensors without values and memory.

Unlike meta tensors they claim to be on the CPU, so torch chooses the kernels it would choose for real ones. What
attention saves for backward depends on that. torch keeps them private.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch._meta_registrations import _create_grouped_mm_output_tensor
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


@torch.library.register_fake("aten::_grouped_mm")  # type: ignore[untyped-decorator]
def _grouped_mm_without_values(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The experts of a layer at once. torch's own function for this takes bfloat16 only, and its kernels do not."""
    output: Tensor = _create_grouped_mm_output_tensor(mat_a, mat_b, offs, out_dtype)  # type: ignore[no-untyped-call]
    return output


def bincount(input: Tensor, minlength: int) -> Tensor:
    """torch.bincount for values below `minlength`, so that its size does not depend on values."""
    counts: Tensor = _bincount(input, minlength)
    return counts


@torch.library.custom_op("gpipe::bincount", mutates_args=())
def _bincount(input: Tensor, minlength: int) -> Tensor:
    counts = torch.bincount(input, minlength=minlength)
    if len(counts) != minlength:
        raise RuntimeError(
            f"bincount with minlength={minlength} got the value {len(counts) - 1}; give a larger one"
        )
    return counts


@_bincount.register_fake
def _bincount_without_values(input: Tensor, minlength: int) -> Tensor:
    return input.new_empty(minlength, dtype=torch.int64)
