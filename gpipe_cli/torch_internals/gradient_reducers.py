"""Detects calls of torch's wrappers that reduce gradients themselves and expect one backward after each forward.

DistributedDataParallel, and `replicate` which is built on it, silently reduce nothing in a backward that follows
another forward. FullyShardedDataParallel fails on freed storage. `fully_shard` reduces in every backward, so it is
allowed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import nn

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
    """Call `notice` with each such wrapper that this thread calls inside the block."""
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
