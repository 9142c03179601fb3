"""The norms of many tensors in one call, and overflows of scaled gradients: torch has no public names for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def foreach_norm(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The 2-norm of each tensor. On the CPU, the bits of torch.linalg.vector_norm, which torch calls for each."""
    norms: tuple[Tensor, ...] = tuple(torch._foreach_norm(list(tensors)))
    return norms


def agree_on_overflow(
    scaler: torch.amp.GradScaler, device: torch.device, largest: Callable[[Tensor], Tensor]
) -> bool:
    """After `unscale_`: replace the scaler's results, of all optimizers, by the largest of all processes.

    Returns whether gradients overflowed in any of them.

    The scaler looks at the gradients of this process only. Where other processes hold other parameters of the same
    model, either all of them skip the step or none.
    """
    if not scaler.is_enabled():
        return False
    of_optimizers = [state["found_inf_per_device"] for state in scaler._per_optimizer_states.values()]
    values = [value.to(device) for found_inf in of_optimizers for value in found_inf.values()]
    agreed = largest(torch.stack(values).max() if values else torch.zeros((), device=device))
    for found_inf in of_optimizers:
        found_inf.clear()
        found_inf[device] = agreed
    return bool(agreed)
