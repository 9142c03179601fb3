"""Run our schedules by torch's classes: which class, how many micro-batches at a time, on which stages.

A schedule's traits name its class. All of them sum gradients in the order of the micro-batches; torch's LoopedBFS does
not, so no schedule names it. A torch schedule takes micro-batches of one size only, and not every number of them:

- those of one stage per process alternate forward and backward only with at least as many micro-batches as processes;
  with fewer, ScheduleGPipe does the same.
- those of several stages run m micro-batches in max(1, m // ranks) rounds of one size.
- a custom schedule runs in torch's runtime, which takes any number of them, and any placement of the stages.

So a mini-batch becomes flushes: runs of equal sizes, and the rest of a run that does not divide evenly. Each flush
drains the pipeline, but gradients still add up in the order of the micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.distributed import PrefixStore, pipelining  # type: ignore[attr-defined]  # public, see torch's docs
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from gpipe_cli.distributed.boundary_shapes import BoundarySpec
from gpipe_cli.distributed.gradient_buckets import GradientBuckets
from gpipe_cli.distributed.groups import RankCoords
from gpipe_cli.distributed.stage import Stage
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.batch_state import BatchState
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.schedule import Kind, Order, ScheduleModule, names, traits
from gpipe_cli.schedule.files import FixedOrder, torch_action
from gpipe_cli.torch_internals.order_runtime import OrderRuntime

TorchScheduleClass: TypeAlias = type[PipelineScheduleSingle] | type[PipelineScheduleMulti]


@final
@dataclass(frozen=True, slots=True)
class Flush:
    """Consecutive micro-batches that one call of a torch schedule runs."""

    schedule: TorchScheduleClass
    first: int
    """Its first micro-batch."""
    count: int


def torch_schedule_class(schedule: str | ScheduleModule) -> TorchScheduleClass:
    """The class that runs our schedule across processes, as the schedule's traits name it."""
    if isinstance(schedule, FixedOrder):
        return OrderRuntime
    name = traits(schedule).torch_schedule
    if name is None:
        raise ConfigError(
            f"schedule={schedule}: torch.distributed.pipelining has no such schedule; use engine=threads"
        )
    torch_class = getattr(pipelining, name, None)
    if not isinstance(torch_class, type) or not issubclass(
        torch_class, PipelineScheduleSingle | PipelineScheduleMulti
    ):
        raise ConfigError(
            f"schedule={schedule}: its torch_schedule={name} is not a schedule of torch.distributed.pipelining"
        )
    return torch_class


def flushes(sizes: Sequence[int], schedule: TorchScheduleClass, ranks: int) -> Iterator[Flush]:
    """The flushes of a mini-batch whose micro-batches have these sizes."""
    first = 0
    for _, run in groupby(sizes):
        remaining = len(list(run))
        while remaining:
            if issubclass(schedule, OrderRuntime):
                count = remaining
                yield Flush(schedule, first, count)
            elif issubclass(schedule, PipelineScheduleMulti):
                # The most that divides into rounds of one size; what is left becomes a flush of its own.
                count = remaining - remaining % max(1, remaining // ranks)
                yield Flush(schedule, first, count)
            else:
                count = remaining
                yield Flush(schedule if count >= ranks else ScheduleGPipe, first, count)
            first, remaining = first + count, remaining - count


def check_placement(schedule: str | ScheduleModule, partitions: int, ranks: int) -> None:
    """Raise ConfigError if torch cannot run the schedule with this many partitions in this many processes."""
    if isinstance(schedule, FixedOrder):
        return  # torch's runtime takes every placement
    given = f"schedule={schedule}: {partitions} partitions for {ranks} processes"
    torch_schedule_class(schedule)
    if not traits(schedule).several_per_device and partitions != ranks:
        several = "|".join(names(several_per_device=True))
        raise ConfigError(f"{given}; each runs one (only schedule={several} gives it several)")
    if partitions % ranks:
        raise ConfigError(f"{given}; every process needs the same number, so give a multiple of {ranks}")
    if ranks == 1 and partitions > 1:
        raise ConfigError(f"{given}; torch needs at least two processes for several partitions")


_torch_log = logging.getLogger("torch.distributed.pipelining.schedules")


@final
class TorchSchedule:
    """A torch schedule with its stages, for flushes of one length and one shape.

    A torch stage owns the receive buffers of one shape and one mode. torch would infer shapes again each time training
    and evaluation alternate, so each has stages of its own.
    """

    def __init__(
        self,
        flush: Flush,
        partitions: Sequence[Partition],
        boundaries: Sequence[BoundarySpec],
        coords: RankCoords,
        *,
        training: bool,
        our_schedule: str | ScheduleModule,
        gradient_buckets: GradientBuckets | None,
    ) -> None:
        """our_schedule: the one that the class of the flush runs."""
        self._count = flush.count
        self._training = training
        self._has_output = coords.has_output
        following = [*boundaries[1:], None]
        # Only torch's schedules of several stages ask a stage for the second half of its backward.
        several_stages = issubclass(flush.schedule, PipelineScheduleMulti)
        order = None
        if isinstance(our_schedule, FixedOrder) and flush.schedule is OrderRuntime:
            order = our_schedule.order(coords.partitions, flush.count, coords.ranks)
        # The ranks of a pipe make the same schedules in the same order, so the same one has the same number in each.
        assert coords.pipe is not None, "torch runs the ranks of a pipe"
        store = coords.pipe.get_group_store()
        store = PrefixStore(str(store.add(f"schedules of rank {coords.rank}", 1)), store)
        every = range(flush.count if several_stages and traits(our_schedule).splits_backward else 0)
        self._stages = [
            Stage(
                partition,
                boundaries[partition.index],
                following[partition.index],
                coords,
                store,
                gradient_buckets,
                split=every if order is None else _split(order, partition.index),
            )
            for partition in partitions
        ]
        stages: Any = self._stages if several_stages else self._stages[0]
        # scale_grads=False: each loss is weighted by its rows already; torch would divide by the count on top of that.
        options: dict[str, Any] = {"loss_fn": _identity_loss if training else None, "scale_grads": False}
        if order is not None:
            options["order"] = [[torch_action(action) for action in own] for own in order]
        self._schedule: Any = flush.schedule(stages, flush.count, **options)

    def run(self, state: BatchState, first: int) -> None:
        """Run the flush that begins with micro-batch `first`."""
        for stage in self._stages:
            stage.begin(state, first)
        # torch requires a target to split if there is a loss; our loss already has the real one.
        needs_target = self._training and self._has_output
        target = {"target": torch.zeros(self._count)} if needs_target else {}
        try:
            with _torch_log_disabled():
                self._schedule.step(**target, return_outputs=False)
        except Exception as error:
            # torch wraps what a stage raised; the caller gets the layer's own error, with the note that names its
            # place.
            failure, state.failure = state.failure, None
            if failure is None or failure is error:
                raise
            raise failure from None
        finally:
            for stage in self._stages:
                stage.end()


def _split(order: Order, partition: int) -> frozenset[int]:
    """The micro-batches of a flush whose backward is split."""
    return frozenset(
        action.micro_batch
        for own in order
        for action in own
        if action.partition == partition and action.kind is Kind.INPUT_GRAD
    )


def _identity_loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage already returns the loss."""
    return output


@contextmanager
def _torch_log_disabled() -> Iterator[None]:
    """torch logs its whole schedule when a stage raises; our own note on the error says more."""
    before, _torch_log.disabled = _torch_log.disabled, True
    try:
        yield
    finally:
        _torch_log.disabled = before
