"""Sums gradients over the replicas in buckets, each as soon as the backward of the last micro-batch has completed it.

A bucket is a few parameters whose gradients are summed as one tensor, so that the replicas exchange the gradients of
the last layers while backward still runs on the first ones. All replicas start the buckets in one fixed order, that in
which backward completes them, and start what is left after the step: a replica whose gradients are missing or late
takes part in the same collectives. (torch's DistributedDataParallel reduces nothing under a split backward, and hangs
where replicas have unequal numbers of micro-batches.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Work

BUCKET_BYTES = 8 * 2**20
"""Small enough that the first sum starts early, large enough that a sum takes longer than it takes to start."""


@final
class Bucket:
    """Parameters of one dtype whose gradients are summed as one tensor."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.awaited: set[Tensor] = set()
        """Parameters whose gradient the running step has not completed."""
        self._present: list[bool] = []
        self._flat = torch.empty(0)
        self._work: Work | None = None

    def start(self, group: ProcessGroup) -> None:
        """Start to sum the gradients; zeros take the place of those that this replica does not have."""
        self._present = [parameter.grad is not None for parameter in self.parameters]
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.parameters
        ]
        # The sum of the flags tells which gradients some replica has, without another collective.
        flags = torch.tensor(self._present).to(gradients[0])
        self._flat = torch.cat([*(gradient.flatten() for gradient in gradients), flags])
        self._work = distributed.all_reduce(self._flat, group=group, async_op=True)

    def finish(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Wait for the sums; each parameter that has a gradient in some replica, with its sum."""
        assert self._work is not None, "a bucket is started before it is finished"
        self._work.wait()
        flat, self._flat, self._work = self._flat, torch.empty(0), None
        sizes = [*(parameter.numel() for parameter in self.parameters), len(self.parameters)]
        pieces = torch.split(flat, sizes)
        # Reading the flags makes the host wait for its device. What this replica has needs no flag.
        present = self._present if all(self._present) else pieces[-1].tolist()
        for parameter, piece, flag in zip(self.parameters, pieces[:-1], present, strict=True):
            if flag:
                yield parameter, piece.view_as(parameter)


@final
class GradientBuckets:
    """The buckets of the parameters of one process, which all processes of the group have."""

    def __init__(
        self, parameters: Sequence[Tensor], group: ProcessGroup, late: Collection[Tensor] = ()
    ) -> None:
        """parameters: in the order in which forward uses them.
        late: those whose gradients are complete only after the last backward.
        """
        self._group = group
        after_step = set(late)
        early = make_buckets([parameter for parameter in reversed(parameters) if parameter not in after_step])
        self._buckets = early + make_buckets(
            [parameter for parameter in parameters if parameter in after_step]
        )
        self._is_last_backward = False
        for bucket in early:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._completed, bucket)
                )

    def begin(self) -> None:
        """A step begins."""
        for bucket in self._buckets:
            bucket.awaited = set(bucket.parameters)
        self._waiting = iter(self._buckets)
        self._next = next(self._waiting, None)

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Inside, the backward of the last micro-batch runs, or the half of it that completes gradients."""
        self._is_last_backward = True
        try:
            yield
        finally:
            self._is_last_backward = False

    def finish(self) -> None:
        """Replace each gradient by the sum over all replicas; those that no replica has stay None."""
        while self._next is not None:
            self._start_next()
        for bucket in self._buckets:
            for parameter, gradient in bucket.finish():
                if parameter.grad is not None:
                    raise RuntimeError(
                        f"a parameter of shape {list(parameter.shape)} got a second gradient in one backward, after "
                        "replicas had begun to sum the first; with torch.utils.checkpoint inside a layer, pass "
                        "use_reentrant=False"
                    )
                parameter.grad = gradient

    def _completed(self, bucket: Bucket, parameter: Tensor) -> None:
        """Called by autograd when it has added to the gradient of a parameter."""
        if not self._is_last_backward:
            return
        bucket.awaited.discard(parameter)
        # In the fixed order only: a bucket that is complete before its turn waits for those before it.
        while self._next is not None and not self._next.awaited:
            self._start_next()

    def _start_next(self) -> None:
        assert self._next is not None, "a bucket waits"
        self._next.start(self._group)
        # The memory of a gradient is free from here on: the sum will take its place.
        for parameter in self._next.parameters:
            parameter.grad = None
        self._next = next(self._waiting, None)


def make_buckets(parameters: Sequence[Tensor]) -> list[Bucket]:
    """Consecutive parameters of one dtype, up to `BUCKET_BYTES`, or a larger one alone; in the order of their ends."""
    buckets: list[Bucket] = []
    pending: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        alike = pending.setdefault(parameter.dtype, [])
        if alike and sum(each.nbytes for each in alike) + parameter.nbytes > BUCKET_BYTES:
            buckets.append(Bucket(pending.pop(parameter.dtype)))
            alike = pending.setdefault(parameter.dtype, [])
        alike.append(parameter)
    return [*buckets, *map(Bucket, pending.values())]


def summed_gradients(parameters: Sequence[Tensor], group: ProcessGroup) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter that has a gradient in some process of the group, with the sum over all of them."""
    buckets = make_buckets(parameters)
    for bucket in buckets:
        bucket.start(group)
    for bucket in buckets:
        yield from bucket.finish()
