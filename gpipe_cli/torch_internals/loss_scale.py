"""Whether scaled gradients overflowed, agreed on among processes.

torch's GradScaler looks at the gradients of this process only and keeps what it found in its private state; where
another process holds other parameters of the same model, all must leave the step out, or none.
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
    """After `unscale_`: let the scaler believe that it found what `largest` makes of all processes' findings."""
    if not scaler.is_enabled():
        return
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    own = (
        torch.stack([one.to(device) for one in found.values()]).max()
        if found
        else torch.zeros((), device=device)
    )
    found.clear()
    found[device] = largest(own)
