"""Takes a flight through the partitions by the actions of a schedule.

Decides which actions belong to a call (all for a step, the forward or the backward part otherwise) and
which thread runs them. Knows nothing of what an action does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from gpipe_cli.pipeline.boundary import Gradients
from gpipe_cli.pipeline.flight import Flight
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.transfer import uses_cuda
from gpipe_cli.pipeline.walk import Recorder, Walk
from gpipe_cli.pipeline.worker import WorkerPool
from gpipe_cli.schedule import Action, Kind, Order, order

__all__ = ["Executor"]


@final
@dataclass(frozen=True, slots=True)
class _Orders:
    whole: Order
    forward: Order
    backward: Order
    in_one_thread: Order
    """The backward part as one list, for a caller whom the workers would wait for."""


@functools.lru_cache(maxsize=128)
def _orders(schedule: str, partitions: int, chunks: int, workers: int) -> _Orders:
    whole = order(schedule, partitions, chunks, workers)
    return _Orders(
        whole=whole,
        forward=_only(whole, lambda action: action.kind is Kind.FORWARD),
        backward=_only(whole, lambda action: action.kind is not Kind.FORWARD),
        in_one_thread=(
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
    def __init__(self, partitions: Sequence[Partition], schedule: str, workers: int) -> None:
        self._partitions = partitions
        self._schedule = schedule
        self._workers = workers
        self._pool = WorkerPool(workers)
        self.timeout: float | None = None
        self.recorder: Recorder | None = None
        # A Python autograd function runs in the engine's thread of its device. A worker's backward on that
        # device needs the same thread, so waiting there for a worker would wait for ever: run it there
        # instead.
        self._backward_in_caller = uses_cuda([partition.device for partition in partitions])

    def forward(self, flight: Flight) -> None:
        self._fly(Walk(flight, self._partitions, self._orders(flight).forward, recorder=self.recorder))

    def step(self, flight: Flight) -> None:
        self._fly(Walk(flight, self._partitions, self._orders(flight).whole, recorder=self.recorder))

    def backward(
        self, flight: Flight, gradients: list[Gradients], *, keep_graph: bool, parameters: bool
    ) -> None:
        if len(flight.kept) < len(self._partitions) * len(flight.micro_batches):
            raise RuntimeError(
                "Trying to backward through the pipe a second time, but what it kept is gone. Specify "
                "retain_graph=True in the first backward"
            )
        flight.output_gradients = gradients
        orders = self._orders(flight)
        walk = Walk(
            flight,
            self._partitions,
            orders.in_one_thread if self._backward_in_caller else orders.backward,
            keep_graph=keep_graph,
            parameters=parameters,
            recorder=self.recorder,
        )
        if self._backward_in_caller:
            walk.run(0)
            walk.raise_failure()
        else:
            self._fly(walk)

    def close(self) -> None:
        self._pool.close()

    def _orders(self, flight: Flight) -> _Orders:
        return _orders(self._schedule, len(self._partitions), len(flight.micro_batches), self._workers)

    def _fly(self, walk: Walk) -> None:
        jobs = [functools.partial(walk.run, worker) for worker in range(self._workers)]
        with self._pool.turn:
            self._pool.run(jobs, walk.fail, self.timeout)
        walk.raise_failure()
