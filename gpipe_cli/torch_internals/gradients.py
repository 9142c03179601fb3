"""What torch keeps private about gradients: the wrappers that reduce them, the norms of many, overflows of scaled ones.

DistributedDataParallel, and `replicate` which is built on it, silently reduce nothing in a backward that follows
another forward. FullyShardedDataParallel fails on freed storage. Both expect one backward after each forward.
`fully_shard` reduces in every backward, so it is allowed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

Notice = Callable[[nn.Module], None]
_ENTRIES = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "_pre_forward"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "forward"),
)
"""For each wrapper, the method with which its forward begins."""


def is_inside_ddp() -> bool:
    """Whether the forward of a DistributedDataParallel is under way, whose module then calls what asks."""
    module, kind, _ = _ENTRIES[0]
    if module not in sys.modules:
        return False
    return getattr(getattr(sys.modules[module], kind), "_active_ddp_module", None) is not None


@final
class _ThreadNotice(threading.local):
    notice: Notice | None = None


_current = _ThreadNotice()


@contextmanager
def noticing_reducers(notice: Notice) -> Iterator[None]:
    """Call `notice` with each of the two wrappers that this thread calls inside the block."""
    # A global forward hook would not patch torch's classes, but torch.compile gives up under one.
    for module, kind, method in _ENTRIES:
        if module in sys.modules:  # a module that is not imported has no instances, and importing it is slow
            _notice_calls(getattr(sys.modules[module], kind), method)
    before, _current.notice = _current.notice, notice
    try:
        yield
    finally:
        _current.notice = before


@functools.cache
def _notice_calls(kind: type[nn.Module], method: str) -> None:
    """Patch `method` for good: undoing it would race with other threads."""
    original = getattr(kind, method)

    @functools.wraps(original)
    def noticed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _current.notice is not None:
            _current.notice(self)
        return original(self, *args, **kwargs)

    setattr(kind, method, noticed)


def foreach_norm(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The 2-norm of each tensor. On the CPU, the bits of torch.linalg.vector_norm, which torch calls for each."""
    norms: tuple[Tensor, ...] = tuple(torch._foreach_norm(list(tensors)))
    return norms


def unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Undo the loss scale of an optimizer's gradients and record overflows; float16 gradients stay scaled.

    Without their scale many float16 gradients would be zero, so torch refuses them. Their update takes the scale away.
    """
    scaled = [
        (parameter, parameter.grad)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and parameter.grad.dtype == torch.float16
    ]
    for parameter, _ in scaled:
        parameter.grad = None
    scaler.unscale_(optimizer)
    for parameter, gradient in scaled:
        parameter.grad = gradient
    if scaled and scaler.is_enabled():
        found_inf = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for device in {gradient.device for _, gradient in scaled}:
            sums = [gradient.sum(dtype=torch.float32) for _, gradient in scaled if gradient.device == device]
            overflowed = (~torch.isfinite(torch.stack(sums))).any().float()
            found_inf[device] = (
                torch.maximum(found_inf[device], overflowed) if device in found_inf else overflowed
            )


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
