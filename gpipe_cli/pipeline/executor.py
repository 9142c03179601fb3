"""Takes a flight through the partitions by the actions of a schedule.

Decides which actions belong to a call (all for a step, the forward or the backward part otherwise) and
which thread runs them. Knows nothing of what an action does.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from gpipe_cli.pipeline.boundary import Gradients
from gpipe_cli.pipeline.flight import Flight
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.residence import Residence
from gpipe_cli.pipeline.transfer import uses_cuda
from gpipe_cli.pipeline.walk import Recorder, Walk
from gpipe_cli.pipeline.worker import WorkerPool
from gpipe_cli.schedule import Action, Kind, Order
from gpipe_cli.torch_internals.thread_modes import CallerModes

__all__ = ["Executor", "MakeOrder"]

MakeOrder = Callable[[int, int, int], Order]
"""By partitions, micro-batches and workers."""


@final
@dataclass(frozen=True, slots=True)
class _Orders:
    whole: Order
    forward: Order
    backward: Order
    in_one_thread: Order
    """The backward part as one list, for a caller whom the workers would wait for."""


@functools.lru_cache(maxsize=128)
def _orders(make_order: MakeOrder, partitions: int, chunks: int, workers: int) -> _Orders:
    whole = make_order(partitions, chunks, workers)
    backward = _only(whole, lambda action: action.kind is not Kind.FORWARD)
    return _Orders(
        whole=whole,
        forward=_only(whole, lambda action: action.kind is Kind.FORWARD),
        backward=backward,
        in_one_thread=backward
        if workers <= 1
        else (
            tuple(
                Action(Kind.BACKWARD, partition, micro_batch)
                for micro_batch in range(chunks)
                for partition in reversed(range(partitions))
            ),
        ),
    )


def _only(whole: Order, belongs: Callable[[Action], bool]) -> Order:
    return tuple(tuple(action for action in actions if belongs(action)) for actions in whole)


@final
class Executor:
    def __init__(
        self,
        partitions: Sequence[Partition],
        make_order: MakeOrder,
        workers: int,
        residences: Sequence[Residence] = (),
    ) -> None:
        """workers: 0 lets the calling thread run the actions.
        residences: one per worker; none where the partitions are always on their devices.
        """
        self._partitions = partitions
        self._make_order = make_order
        self._residences = residences
        self._workers = workers
        self._pool = WorkerPool(workers)
        self.timeout: float | None = None
        self.recorder: Recorder | None = None
        # A Python autograd function runs in the engine's thread of its device. A worker's backward on that
        # device needs the same thread, so waiting there for a worker would wait for ever: run it there
        # instead.
        self._backward_in_caller = uses_cuda([partition.device for partition in partitions])

    def forward(self, flight: Flight) -> None:
        self._fly(self._walk(flight, self._orders(flight).forward))

    def step(self, flight: Flight) -> None:
        self._fly(self._walk(flight, self._orders(flight).whole))

    def backward(self, flight: Flight, gradients: list[Gradients], *, keep_graph: bool) -> None:
        if len(flight.kept) < len(self._partitions) * len(flight.micro_batches):
            raise RuntimeError(
                "Trying to backward through the pipe a second time, but what it kept is gone. Specify "
                "retain_graph=True in the first backward"
            )
        flight.output_gradients = gradients
        orders = self._orders(flight)
        order = orders.in_one_thread if self._backward_in_caller else orders.backward
        walk = self._walk(flight, order, keep_graph=keep_graph)
        if self._backward_in_caller:
            walk.run(0)
            walk.raise_failure()
        else:
            self._fly(walk)

    def close(self) -> None:
        self._pool.close()

    def _orders(self, flight: Flight) -> _Orders:
        return _orders(self._make_order, len(self._partitions), len(flight.micro_batches), self._workers)

    def _walk(self, flight: Flight, order: Order, *, keep_graph: bool = False) -> Walk:
        return Walk(
            flight,
            self._partitions,
            order,
            keep_graph=keep_graph,
            recorder=self.recorder,
            residences=self._residences,
            modes=CallerModes.capture() if self._workers else None,
        )

    def _fly(self, walk: Walk) -> None:
        # Each worker gets the caller's context variables, in a copy that it may change.
        jobs = [
            functools.partial(contextvars.copy_context().run, walk.run, worker)
            for worker in range(self._workers)
        ]
        with self._pool.turn:
            if self._workers:
                self._pool.run(jobs, walk.fail, self.timeout)
            else:
                walk.run(0)
        walk.raise_failure()
