"""Runs mini-batches through the partitions: forward, a whole step, and the backward of an earlier forward.

The executor picks the actions that belong to a call, and lets the workers or the calling thread run them.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import final

import torch

from gpipe_cli.accelerator.copies import wait_for_copies
from gpipe_cli.accelerator.devices import is_accelerator
from gpipe_cli.accelerator.streams import StreamSet
from gpipe_cli.pipeline.action_loop import ActionLoop, PartitionStore, Recorder
from gpipe_cli.pipeline.batch_state import BatchState
from gpipe_cli.pipeline.batchnorm import commit_or_discard, deferred_batch_norms
from gpipe_cli.pipeline.boundary import Gradients
from gpipe_cli.pipeline.layer_logging import log_layer_times
from gpipe_cli.pipeline.loss import StepLoss
from gpipe_cli.pipeline.microbatch import MiniBatch, Value
from gpipe_cli.pipeline.module_state import SharedState, modules_of
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.pipe_function import attach_to_graph
from gpipe_cli.pipeline.tied import TiedParameters
from gpipe_cli.pipeline.workers import WorkerPool
from gpipe_cli.schedule import Action, Kind, Order
from gpipe_cli.torch_internals.dispatch_modes import CallerModes

MakeOrder = Callable[[int, int, int], Order]
"""Takes the numbers of partitions, micro-batches and workers."""


@final
@dataclass(frozen=True, slots=True)
class _CallOrders:
    whole: Order
    forward: Order
    backward: Order
    backward_in_one_thread: Order


@functools.lru_cache(maxsize=128)
def _call_orders(make_order: MakeOrder, partitions: int, chunks: int, workers: int) -> _CallOrders:
    # `loss.backward()` comes after the whole forward, so a call of the pipe uses the forward part of the schedule and
    # its backward the rest. Both keep the order of each worker.
    whole = make_order(partitions, chunks, workers)
    forward = tuple(tuple(each for each in actions if each.kind is Kind.FORWARD) for actions in whole)
    backward = tuple(tuple(each for each in actions if each.kind is not Kind.FORWARD) for actions in whole)
    # One thread must not wait for itself: each micro-batch passes all partitions before the next one begins.
    one_thread = tuple(
        Action(Kind.BACKWARD, partition, micro_batch)
        for micro_batch in range(chunks)
        for partition in reversed(range(partitions))
    )
    return _CallOrders(whole, forward, backward, backward if workers <= 1 else (one_thread,))


@final
class Executor:
    def __init__(
        self,
        partitions: Sequence[Partition],
        make_order: MakeOrder,
        workers: int,
        *,
        stores: Sequence[PartitionStore] = (),
    ) -> None:
        """workers: 0 lets the calling thread run the actions.
        stores: those of the partitions, which take them in turn; empty if partitions never leave their devices.
        """
        self.partitions = partitions
        self.timeout: float | None = None
        self.recorder: Recorder | None = None
        self._layers = [layer.module for partition in partitions for layer in partition.layers]
        devices = [partition.device for partition in partitions for _ in partition.layers]
        self._devices = devices if len(set(devices)) > 1 else ()
        self._lengths = [len(partition.layers) for partition in partitions]
        self._batch_norms = [each for layer in self._layers for each in deferred_batch_norms(layer)]
        self._make_order = make_order
        self._stores = stores
        self._workers = workers
        self._pool = WorkerPool(workers)
        self._accelerators = [device for device in dict.fromkeys(devices) if is_accelerator(device)]
        # A Python autograd function runs in the autograd thread of its device. The backward of a worker on that device
        # needs the same thread, so waiting there for a worker would never end: run the backward there instead.
        self._backward_in_caller = bool(self._accelerators)

    def forward(self, batch: MiniBatch, checkpointed_counts: Sequence[int]) -> Value:
        """The joined output, attached to the input and the parameters for `loss.backward()`."""
        state = self._new_state(batch, checkpointed_counts, None)
        with self._undone_if_it_fails():
            self._run(state, self._orders(state).forward)
        return attach_to_graph(state, self.backward)

    def step(self, batch: MiniBatch, loss: StepLoss, checkpointed_counts: Sequence[int]) -> None:
        """Forward and backward: fill `.grad` of parameters and inputs, and the losses of `loss`."""
        state = self._new_state(batch, checkpointed_counts, loss)
        with self._undone_if_it_fails():
            self._run(state, self._orders(state).whole)
        for untied in state.untied_by_layer():
            state.tied.add_up(untied)
        # The workers only filled the gradients of detached inputs: autograd carries them on from here.
        _backward_of_inputs(state)

    def loss(self, batch: MiniBatch, loss: StepLoss) -> None:
        """Forward without backward: fill the losses of `loss`."""
        state = self._new_state(batch, [0] * max(1, len(self.partitions)), loss)
        with self._undone_if_it_fails():
            self._run(state, self._orders(state).forward)

    @contextmanager
    def _undone_if_it_fails(self) -> Iterator[None]:
        """Run a mini-batch inside: nothing that it changed in buffers stays if it raises."""
        failed = True
        try:
            with commit_or_discard(self._batch_norms):
                yield
            failed = False
        finally:
            for partition in self.partitions:
                partition.state.end(failed=failed)

    def backward(self, state: BatchState, gradients: list[Gradients], *, keep_graph: bool) -> None:
        """The backward of an earlier forward, from the gradients of each micro-batch's output."""
        if len(state.saved) < len(self.partitions) * len(state.batch.micro_batches):
            raise RuntimeError(
                "Trying to backward through the pipe a second time, but what it saved has been freed. Specify "
                "retain_graph=True in the first backward"
            )
        state.output_gradients = gradients
        orders = self._orders(state)
        if not self._backward_in_caller:
            self._run(state, orders.backward, keep_graph=keep_graph)
            return
        loop = self._action_loop(state, orders.backward_in_one_thread, keep_graph)
        # Autograd's thread has no context variables of the caller, and recompute must see those of the forward.
        state.context.copy().run(loop.run, 0)
        self._end(loop)

    @property
    def partition_devices(self) -> dict[int, torch.device]:
        return {partition.index: partition.device for partition in self.partitions}

    def log_layers(self) -> None:
        log_layer_times(self.partitions)

    def close(self) -> None:
        self._pool.close()

    def _new_state(
        self, batch: MiniBatch, checkpointed_counts: Sequence[int], loss: StepLoss | None
    ) -> BatchState:
        # Users may tie or replace parameters between two calls, so this is not done once in the constructor.
        # Not while the workers of another caller run: they put parameters of their own into the modules.
        with self._pool.one_caller:
            # A step runs hooks in the workers; otherwise the caller's backward runs them, with the whole gradient.
            tied = TiedParameters(self._layers, self._devices, separate_hooked=loss is None)
            layers = iter(self._layers)
            shared = SharedState.between([list(islice(layers, length)) for length in self._lengths])
            if loss is not None and loss.modules:
                # What a layer holds is protected in its own partition.
                own = modules_of(self._layers)
                loss.modules = [module for module in loss.modules if module not in own]
        streams = StreamSet.current(self._accelerators)
        return BatchState.of(
            batch, self._lengths, tied, checkpointed_counts, loss, shared=shared, streams=streams
        )

    def _orders(self, state: BatchState) -> _CallOrders:
        return _call_orders(
            self._make_order, len(self.partitions), len(state.batch.micro_batches), self._workers
        )

    def _action_loop(self, state: BatchState, order: Order, keep_graph: bool) -> ActionLoop:
        return ActionLoop(
            state,
            self.partitions,
            order,
            keep_graph=keep_graph,
            recorder=self.recorder,
            stores=self._stores,
            modes=CallerModes.capture() if self._workers else None,
        )

    def _run(self, state: BatchState, order: Order, *, keep_graph: bool = False) -> None:
        loop = self._action_loop(state, order, keep_graph)
        # Each worker gets the caller's context variables, in a copy that it may change.
        jobs = [
            functools.partial(contextvars.copy_context().run, loop.run, worker)
            for worker in range(self._workers)
        ]
        # Workers end their job even after a failure, so the failure is raised when nobody uses the tensors any more.
        with self._pool.one_caller:
            if self._workers:
                self._pool.run(jobs, loop.fail, self.timeout)
            else:
                loop.run(0)
        self._end(loop)

    def _end(self, loop: ActionLoop) -> None:
        try:
            # Copies run beside the caller's streams, and may read memory that the caller writes next.
            wait_for_copies(self._accelerators)
        finally:
            # After an error of a kernel, the device refuses to wait as well: the caller gets the first failure.
            loop.raise_failure()


def _backward_of_inputs(state: BatchState) -> None:
    """The input of a step may require grad, or be computed from tensors that do."""
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(state.batch.tensors, state.joined_input_gradients(), strict=True)
        if tensor.requires_grad and gradient is not None
    ]
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, gradients)
