"""Lets all processes agree whether scaled gradients overflowed.

torch's GradScaler looks at the gradients of this process only and keeps the result in private state. Where other
processes hold other parameters of the same model, either all of them skip the step or none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def agree_on_overflow(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    largest: Callable[[Tensor], Tensor],
) -> None:
    """After `unscale_`: replace the scaler's result by the largest of all processes."""
    if not scaler.is_enabled():
        return
    found_inf = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    own = (
        torch.stack([value.to(device) for value in found_inf.values()]).max()
        if found_inf
        else torch.zeros((), device=device)
    )
    found_inf.clear()
    found_inf[device] = largest(own)
