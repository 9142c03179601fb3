"""Lets ranks on simulated devices exchange tensors: no backend knows these devices, so gloo sends copies on the CPU.

torch's schedules and our own code call the methods of ProcessGroup, which are replaced here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves, tree_map_only

METHODS = ("send", "recv", "allreduce", "broadcast", "allgather")


class _StagedWork:
    """Copies what has arrived to the device when it is waited for."""

    def __init__(self, work: Any, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._work = work
        self._pairs = pairs
        """Each tensor on the device, and its copy on the CPU."""

    def wait(self) -> None:
        self._work.wait()
        for tensor, copy in self._pairs:
            tensor.copy_(copy)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


@contextmanager
def staged_through_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in METHODS:
            patch.setattr(ProcessGroup, name, _staged(name, getattr(ProcessGroup, name)))
        yield


def _staged(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: ProcessGroup, *arguments: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return method(group, *arguments)
        copies = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), arguments)
        own = [leaf for leaf in tree_leaves(copies) if isinstance(leaf, Tensor)]
        received = [] if name == "send" else list(zip((t.detach() for t in tensors), own, strict=True))
        return _StagedWork(method(group, *copies), received)

    return call
