"""Notices calls of torch's wrappers that reduce gradients by themselves and expect a backward after each forward.

DistributedDataParallel, and the older `replicate` that is made of it, reduce nothing in a backward that has another
forward before it, and say nothing. FullyShardedDataParallel fails on freed storage. `fully_shard` is not among them:
it reduces in every backward.
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
"""Of each wrapper the method with which its forward begins."""


@final
class _Here(threading.local):
    notice: Notice | None = None


_here = _Here()


@contextmanager
def noticing_reducers(notice: Notice) -> Iterator[None]:
    """Call `notice` with each such wrapper that this thread calls inside the block."""
    # A global forward hook would do without a change to torch's classes, but torch.compile gives up under one.
    for module, kind, method in _ENTRIES:
        if module in sys.modules:  # what nobody has imported has no instances, and importing it takes long
            _notice_calls(getattr(sys.modules[module], kind), method)
    before, _here.notice = _here.notice, notice
    try:
        yield
    finally:
        _here.notice = before


@functools.cache
def _notice_calls(kind: type[nn.Module], method: str) -> None:
    """Once and for all: to undo it would be a race with other threads that do the same."""
    original = getattr(kind, method)

    @functools.wraps(original)
    def noticed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _here.notice is not None:
            _here.notice(self)
        return original(self, *args, **kwargs)

    setattr(kind, method, noticed)
