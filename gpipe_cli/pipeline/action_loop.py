"""The loop of a worker over its actions.

The first failure wins: every worker that waits is woken up, and no action begins after it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, final

import torch

from gpipe_cli.accelerator.copies import CopyTime
from gpipe_cli.accelerator.device_errors import note_kernel_error
from gpipe_cli.accelerator.streams import NO_STREAMS, set_current_device
from gpipe_cli.pipeline.batch_state import BatchState
from gpipe_cli.pipeline.boundary import PartitionInput
from gpipe_cli.pipeline.channels import ChannelClosed, Channels
from gpipe_cli.pipeline.failures import add_note, failure_note
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.schedule.action import Action, Kind, Order
from gpipe_cli.torch_internals.dispatch_modes import CallerModes

_NO_MODES = _NO_LOCK = contextlib.nullcontext()


class Recorder(Protocol):
    """Called after each piece of work, by the thread that did it.

    `phase` is forward, recompute, backward, copy for sending the result, or load and drop for bringing a partition to
    its device and removing it.
    """

    def now(self, device: torch.device) -> Any:
        """This moment in the work of a device; on an accelerator an event for `elapsed_time`."""

    def __call__(self, action: Action, phase: str, begin: Any, end: Any) -> None: ...


@final
@dataclass(frozen=True, slots=True)
class PartitionVisit:
    """Consecutive actions of a worker on one partition."""

    actions: tuple[Action, ...]
    completes_gradients: bool
    """Whether it holds the partition's last backward: after it, the partition's gradients are complete."""

    @property
    def partition(self) -> int:
        return self.actions[0].partition


class PartitionStore(Protocol):
    """Where the partitions of one worker are while it does not work on them."""

    def on_device(
        self, visit: PartitionVisit, following: PartitionVisit | None
    ) -> AbstractContextManager[object]:
        """Inside, the partition is on the worker's device; `following` is the visit to prefetch for."""

    def offload(self, input: PartitionInput) -> Callable[[], PartitionInput] | None:
        """Store an input that recompute needs, and return how to fetch it; None leaves it where it is."""


def partition_visits(actions: Sequence[Action]) -> list[PartitionVisit]:
    last = {action.partition: action for action in actions if action.kind is not Kind.FORWARD}
    runs = [tuple(run) for _, run in groupby(actions, key=lambda action: action.partition)]
    return [PartitionVisit(run, last.get(run[0].partition) in run) for run in runs]


@final
class _Position:
    """Where a worker is, for the note on an error."""

    __slots__ = ("action", "phase")

    def __init__(self) -> None:
        self.action: Action | None = None
        self.phase = ""


@final
class ActionLoop:
    """One pass of all workers over their actions for one mini-batch."""

    def __init__(
        self,
        state: BatchState,
        partitions: Sequence[Partition],
        order: Order,
        *,
        keep_graph: bool = False,
        recorder: Recorder | None = None,
        stores: Sequence[PartitionStore] = (),
        modes: CallerModes | None = None,
    ) -> None:
        """stores: those of the partitions, which take them in turn; none where partitions stay on their devices."""
        self._state = state
        self._partitions = partitions
        self._order = order
        self._keep_graph = keep_graph
        self._recorder = recorder
        self._stores = stores
        self._channels = Channels(partitions, state, timed=recorder is not None)
        self._failure_lock = threading.Lock()
        self._failure: BaseException | None = None
        self._modes = modes
        self._shared_modules = threading.Lock()
        self._handlers: dict[Kind, Callable[[_Position, Action], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT_GRAD: self._backward,
            Kind.WEIGHT_GRAD: self._backward_weights,
        }

    def run(self, worker: int) -> None:
        """Run the actions of one worker; never raises."""
        position = _Position()
        actions = self._order[worker]
        try:
            with self._state.batch.state.entered(), self._state.streams.entered():
                self._begin({action.partition for action in actions if action.kind is Kind.FORWARD})
                if self._stores or self._state.streams is not NO_STREAMS:
                    self._run_visits(position, actions)
                else:
                    for position.action in actions:  # kept in `position` for the note on an error
                        self._handlers[position.action.kind](position, position.action)
        except ChannelClosed:
            return  # another worker failed, and has kept its failure for the caller
        except BaseException as error:  # noqa: BLE001 - whatever a layer raises, the caller must see
            # Close the channels before anything else: no worker may wait while this one describes its failure.
            self.fail(error)
            if position.action is not None:
                add_note(error, functools.partial(self._describe, position.action, position.phase, error))
            note_kernel_error(error)

    def _begin(self, partitions: Iterable[int]) -> None:
        for index in partitions:
            partition = self._partitions[index]
            with self._modules_of(partition):
                partition.begin(self._state.shared, self._state.loss_modules if partition.is_last else ())

    def fail(self, error: BaseException) -> None:
        """Keep the first failure and wake up every worker that waits."""
        # Later failures are mostly consequences of the first one.
        with self._failure_lock:
            if self._failure is None:
                self._failure = error
        self._channels.close()

    def raise_failure(self) -> None:
        """Called by the caller when all workers have ended."""
        failure, self._failure = self._failure, None
        if failure is None:
            return
        try:
            raise failure
        finally:
            # The traceback refers to this frame; without this, the error and its tensors would keep each other alive.
            del failure

    def _describe(self, action: Action, phase: str, error: BaseException) -> str:
        saved = self._state.saved.get((action.partition, action.micro_batch))
        partition = self._partitions[action.partition]
        return failure_note(action, phase, partition.locate(phase, saved, error), partition.device, error)

    def _run_visits(self, position: _Position, actions: Sequence[Action]) -> None:
        """Run the actions partition by partition, on its device, where its store brings it for the visit."""
        visits = partition_visits(actions)
        for place, visit in enumerate(visits):
            # One thread may run the backward of all workers, so neither the device nor the store is always the same.
            set_current_device(self._partitions[visit.partition].device)
            store = self._store_of(visit)
            following = next((later for later in visits[place + 1 :] if self._store_of(later) is store), None)
            position.action, position.phase = visit.actions[0], "load"
            with self._on_device(store, visit, following):
                for position.action in visit.actions:
                    self._handlers[position.action.kind](position, position.action)
                    if not visit.completes_gradients and position.action.kind is Kind.FORWARD:
                        self._offload_inputs(position.action, store)
                position.phase = "update" if visit.completes_gradients else "store"

    def _store_of(self, visit: PartitionVisit) -> PartitionStore | None:
        """None if the partition is on its device already, or need not be."""
        if not self._stores or not self._uses_layers(visit):
            return None
        return self._stores[visit.partition % len(self._stores)]

    def _uses_layers(self, visit: PartitionVisit) -> bool:
        """Whether the partition must be on its device: the backward of a frozen start has nothing to run."""
        if self._partitions[visit.partition].state.parameters.any_trained:
            return True
        saved = (self._state.saved.get((visit.partition, action.micro_batch)) for action in visit.actions)
        return any(
            action.kind is Kind.FORWARD or own is None or own.has_backward
            for action, own in zip(visit.actions, saved, strict=True)
        )

    @contextmanager
    def _on_device(
        self, store: PartitionStore | None, visit: PartitionVisit, following: PartitionVisit | None
    ) -> Iterator[None]:
        if store is None:
            yield
            return
        partition = self._partitions[visit.partition]
        started = self._now(partition)
        with store.on_device(visit, following):
            self._record(visit.actions[0], "load", partition, started)
            yield
            started = self._now(partition)
        self._record(visit.actions[-1], "drop", partition, started)

    def _offload_inputs(self, action: Action, store: PartitionStore | None) -> None:
        # The input of the first partition belongs to the caller and stays in memory anyway.
        saved = self._state.saved.get((action.partition, action.micro_batch))
        if saved is not None and store is not None and action.partition > 0:
            saved.offload(store.offload)

    def _forward(self, position: _Position, action: Action) -> None:
        self._check_no_failure()
        partition = self._partitions[action.partition]
        position.phase = "forward"
        # Blocks until the partitions that send to this one have run the micro-batch, or a worker has failed.
        inputs = self._channels.receive(partition, action.micro_batch)
        task = self._state.forward_task(action.partition, action.micro_batch)
        self._check_no_failure()
        started = self._now(partition)
        with self._caller_modes(), self._modules_of(partition):
            outputs, saved = partition.forward(inputs, task)
        started = self._record(action, position.phase, partition, started)
        # Saved before it is sent: the gradient can return as soon as the following partition has the output.
        self._state.saved[action.partition, action.micro_batch] = saved
        position.phase = "copy"
        times = self._channels.send(partition, action.micro_batch, outputs)
        if action.partition < len(self._partitions) - 1:
            self._record_copies(action, partition, started, times)

    def _backward(self, position: _Position, action: Action) -> None:
        self._check_no_failure()
        partition = self._partitions[action.partition]
        saved = self._state.saved[action.partition, action.micro_batch]
        if saved.inputs is not None:
            # Recompute before waiting for the gradient: this hides recompute in the idle time of the pipeline.
            position.phase = "recompute"
            started = self._now(partition)
            with self._caller_modes(), self._modules_of(partition):
                partition.recompute(saved)
            self._record(action, position.phase, partition, started)
        position.phase = "backward"
        gradients = self._channels.receive_gradients(partition, action.micro_batch)
        self._check_no_failure()
        started = self._now(partition)
        with self._caller_modes():
            run = partition.backward_input if action.kind is Kind.INPUT_GRAD else partition.backward
            gradients = run(saved, gradients, keep_graph=self._keep_graph)
        started = self._record(action, position.phase, partition, started)
        # Free the graph before the gradient leaves, so that the activations of two micro-batches do not add up.
        if action.kind is Kind.BACKWARD:
            self._state.release(action.partition, action.micro_batch, keep_graph=self._keep_graph)
        position.phase = "copy"
        times = self._channels.send_gradients(partition, gradients, saved)
        if action.partition > 0:
            self._record_copies(action, partition, started, times)

    def _backward_weights(self, position: _Position, action: Action) -> None:
        self._check_no_failure()
        partition = self._partitions[action.partition]
        position.phase = "backward"
        started = self._now(partition)
        saved = self._state.saved[action.partition, action.micro_batch]
        with self._caller_modes():
            partition.backward_weights(saved, keep_graph=self._keep_graph)
        self._record(action, position.phase, partition, started)
        self._state.release(action.partition, action.micro_batch, keep_graph=self._keep_graph)

    def _caller_modes(self) -> AbstractContextManager[object]:
        """The dispatch and function modes of the caller."""
        return _NO_MODES if self._modes is None else self._modes.entered()

    def _modules_of(self, partition: Partition) -> AbstractContextManager[object]:
        """Partitions that share modules run their layers in turn: each replaces tensors of the modules meanwhile."""
        return self._shared_modules if partition.shares_modules else _NO_LOCK

    def _check_no_failure(self) -> None:
        if self._failure is not None:
            raise ChannelClosed

    def _now(self, partition: Partition) -> Any:
        return None if self._recorder is None else self._recorder.now(partition.device)

    def _record(self, action: Action, phase: str, partition: Partition, started: Any) -> Any:
        """Return the end, where the next phase begins."""
        if self._recorder is None:
            return None
        end = self._recorder.now(partition.device)
        self._recorder(action, phase, started, end)
        return end

    def _record_copies(
        self, action: Action, partition: Partition, started: Any, times: Sequence[CopyTime]
    ) -> None:
        """Copies on side streams have times of their own; other copies took the worker's time until now."""
        if self._recorder is not None:
            for begin, end in times or ((started, self._recorder.now(partition.device)),):
                self._recorder(action, "copy", begin, end)
