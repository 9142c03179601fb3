"""torch's fake tensors: tensors without values and memory.

Unlike meta tensors they claim to be on the CPU, so torch chooses the kernels it would choose for real ones. What
attention saves for backward depends on that. torch keeps them private.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from gpipe_cli.torch_internals.without_compiler import without_compiler

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Raised by an operation that needs values, or has no implementation without them."""


def fake_tensors() -> AbstractContextManager[None]:
    """Inside, every operation of this thread gives a fake tensor; real ones may be among its inputs.

    It may be entered again, for tensors made the time before.
    """
    return _FakeTensors()


@final
class _FakeTensors(AbstractContextManager[None]):
    def __init__(self) -> None:
        # One mode for all uses: torch does not let tensors of two modes meet.
        with without_compiler():
            self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(without_compiler())
        self._entered.enter_context(self._mode)

    def __exit__(self, *_: object) -> None:
        self._entered.close()


def fake_twin(tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """For use inside `fake_tensors`: one like `tensor`, on `device`."""
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)
