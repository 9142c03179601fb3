"""Records what this process posts to torch.distributed, at the methods of ProcessGroup that every call ends in.

`batch_isend_irecv` is recorded as one batch: a backend that coalesces, like NCCL, starts its operations together. Of a
collective, its start and each wait for it are recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Work

from tests.distributed.rendezvous import RECEIVE, SEND, WAIT, Batch, Operation

COLLECTIVES = ("allreduce", "broadcast", "allgather", "_allgather_base", "barrier")


class Recorder:
    def __init__(self) -> None:
        self.program: list[Batch] = []
        self._batch: list[Operation] | None = None
        self._collectives: Counter[str] = Counter()

    def add(self, operation: Operation) -> None:
        if self._batch is None:
            self.program.append((operation,))
        else:
            self._batch.append(operation)

    def batched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(operations: Any) -> Any:
            self._batch = []
            try:
                return function(operations)
            finally:
                self.program.append(tuple(self._batch))
                self._batch = None

        return call

    def point_to_point(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ProcessGroup, tensors: list[Tensor], peer: int, *more: Any) -> Any:
            members = distributed.get_process_group_ranks(group)
            self.add(Operation(kind, group.group_name, (members[peer],), _content(tensors[0])))
            return method(group, tensors, peer, *more)

        return call

    def collective(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: ProcessGroup, *arguments: Any, **more: Any) -> Any:
            members = tuple(distributed.get_process_group_ranks(group))
            self.add(Operation(kind, group.group_name, members, _content(arguments)))
            wait = Operation(WAIT, group.group_name, (self._collectives[group.group_name],), "")
            self._collectives[group.group_name] += 1
            return _RecordedWork(method(group, *arguments, **more), lambda: self.add(wait))

        return call


class _RecordedWork:
    """A collective under way."""

    def __init__(self, work: Work, record_wait: Callable[[], None]) -> None:
        self._work, self._record_wait = work, record_wait

    def wait(self) -> bool:
        self._record_wait()
        return self._work.wait()


@contextmanager
def recording() -> Iterator[Recorder]:
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        for kind in (SEND, RECEIVE):
            patch.setattr(ProcessGroup, kind, recorder.point_to_point(kind, getattr(ProcessGroup, kind)))
        for kind in COLLECTIVES:
            patch.setattr(ProcessGroup, kind, recorder.collective(kind, getattr(ProcessGroup, kind)))
        patch.setattr(distributed, "batch_isend_irecv", recorder.batched(distributed.batch_isend_irecv))
        yield recorder


def _content(arguments: Any) -> str:
    """The dtype and size of the first tensor among arguments of a method."""
    while isinstance(arguments, list | tuple) and arguments:
        arguments = arguments[0]
    return f"{arguments.numel()} {arguments.dtype}" if isinstance(arguments, torch.Tensor) else ""
