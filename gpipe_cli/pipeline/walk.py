"""Workers walking their lists of actions.

Decides what an action does and what a failure does: the first one wins, everybody who waits learns of it,
and no action begins after it. Knows nothing of threads' lives or of schedules.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Protocol, final

import torch

from gpipe_cli.pipeline.failure import add_note
from gpipe_cli.pipeline.flight import Flight
from gpipe_cli.pipeline.partition import Partition
from gpipe_cli.pipeline.residence import Residence, Stay, stays
from gpipe_cli.pipeline.routes import Routes, WayClosed
from gpipe_cli.schedule.action import Action, Kind, Order
from gpipe_cli.torch_internals.thread_modes import CallerModes

__all__ = ["Recorder", "Walk", "failure_note"]

_NO_MODES = contextlib.nullcontext()
logger = logging.getLogger("gpipe_cli.pipeline")


class Recorder(Protocol):
    """Told of each piece of work when it has ended, by the thread that did it.

    `phase` is forward, recompute, backward, copy for the handing over of what came of it, or load and drop for
    bringing in a partition and putting it away.
    """

    def now(self, device: torch.device) -> Any:
        """This moment in the work of a device, in a form of the recorder's own."""

    def __call__(self, action: Action, phase: str, begin: Any, end: Any) -> None: ...


@final
class Walk:
    """One pass of all workers over their actions."""

    def __init__(
        self,
        flight: Flight,
        partitions: Sequence[Partition],
        order: Order,
        *,
        keep_graph: bool = False,
        recorder: Recorder | None = None,
        residences: Sequence[Residence] = (),
        modes: CallerModes | None = None,
    ) -> None:
        self._flight = flight
        self._partitions = partitions
        self._order = order
        self._keep_graph = keep_graph
        self._recorder = recorder
        self._residences = residences
        self._routes = Routes(partitions, flight)
        self._first = threading.Lock()
        self._failure: BaseException | None = None
        self._modes = modes
        self._logs = logger.isEnabledFor(logging.INFO)

    def run(self, worker: int) -> None:
        """Walk one worker's list; never raises."""
        place = _Place()
        actions = self._order[worker]
        try:
            for index in {action.partition for action in actions if action.kind is Kind.FORWARD}:
                self._partitions[index].begin()
            with self._flight.batch.state.entered():
                for stay, following in self._stays(worker):
                    with self._staying(worker, stay, following):
                        self._perform_all(place, stay, worker)
        except WayClosed:
            return
        except BaseException as error:  # noqa: BLE001 - whatever a layer raises is the caller's to see
            # First of all: nobody may wait while the failure is being described.
            self.fail(error)
            if place.action is not None:
                add_note(error, functools.partial(self._describe, place.action, place.phase, error))

    def _describe(self, action: Action, phase: str, error: BaseException) -> str:
        partition = self._partitions[action.partition]
        kept = self._flight.kept.get((action.partition, action.micro_batch))
        return failure_note(action, phase, partition.whereabouts(phase, kept, error))

    def fail(self, error: BaseException) -> None:
        """Remember the first failure and let nobody wait in vain."""
        with self._first:
            if self._failure is None:
                self._failure = error
        self._routes.close()

    def raise_failure(self) -> None:
        """In the caller, when all workers have ended."""
        failure, self._failure = self._failure, None
        if failure is None:
            return
        try:
            raise failure
        finally:
            # The traceback knows this frame: without this, error and tensors would keep each other alive.
            del failure

    def _stays(self, worker: int) -> Iterator[tuple[Stay, Stay | None]]:
        """Each stay with the one after it; where partitions are always there, one stay is as good as many."""
        actions = self._order[worker]
        found = stays(actions) if self._residences else [Stay(actions, completes=False)]
        return zip_longest(found, found[1:]) if actions else iter(())

    @contextmanager
    def _staying(self, worker: int, stay: Stay, following: Stay | None) -> Iterator[None]:
        if not self._residences:
            yield
            return
        partition = self._partitions[stay.partition]
        begin = self._now(partition)
        with self._residences[worker].staying(stay, following):
            self._record(stay.actions[0], "load", partition, begin)
            yield
            begin = self._now(partition)
        self._record(stay.actions[-1], "drop", partition, begin)

    def _perform_all(self, place: _Place, stay: Stay, worker: int) -> None:
        for place.action in stay.actions:
            if self._failure is not None:
                raise WayClosed
            self._perform(place)
            if self._residences and not stay.completes and place.action.kind is Kind.FORWARD:
                self._put_away(place.action, self._residences[worker])

    def _put_away(self, action: Action, residence: Residence) -> None:
        """What a partition will be recomputed from; the first one's input is the caller's, and stays anyhow."""
        kept = self._flight.kept.get((action.partition, action.micro_batch))
        if kept is not None and action.partition > 0:
            kept.put_away(residence.put_away)

    def _perform(self, place: _Place) -> None:
        action = place.action
        assert action is not None, "a place has its action before it is performed"
        partition = self._partitions[action.partition]
        if action.kind is Kind.FORWARD:
            self._forward(place, partition, action)
        elif action.kind is Kind.WEIGHT_GRAD:
            self._backward_weights(place, partition, action)
        else:
            self._backward(place, partition, action)

    def _forward(self, place: _Place, partition: Partition, action: Action) -> None:
        place.phase = "forward"
        parcels = self._routes.receive(partition, action.micro_batch)
        visit = self._flight.visit(action.partition, action.micro_batch)
        if self._logs:
            logger.info(
                "Micro-batch %d (partition %d): checkpoint_stop=%d, using_checkpointing=%s",
                action.micro_batch,
                action.partition,
                self._flight.checkpoint_stops[action.partition],
                visit.checkpointed,
            )
        if self._failure is not None:
            raise WayClosed
        begin = self._now(partition)
        with self._in_modes():
            outputs, kept = partition.forward(parcels, visit)
        begin = self._record(action, place.phase, partition, begin)
        if kept is not None:
            self._flight.kept[action.partition, action.micro_batch] = kept
        self._routes.send(partition, action.micro_batch, outputs)
        if action.partition < len(self._partitions) - 1:
            self._record(action, "copy", partition, begin)

    def _backward(self, place: _Place, partition: Partition, action: Action) -> None:
        kept = self._flight.kept[action.partition, action.micro_batch]
        if kept.parcels is not None:
            # Before the gradient is waited for: this is what makes recomputation cheap in a pipeline.
            place.phase = "recompute"
            begin = self._now(partition)
            with self._in_modes():
                partition.recompute(kept)
            self._record(action, place.phase, partition, begin)
        place.phase = "backward"
        gradients = self._routes.receive_gradients(partition, action.micro_batch)
        if self._failure is not None:
            raise WayClosed
        begin = self._now(partition)
        collected = self._flight.collected
        with self._in_modes():
            # A backward whose gradients the caller collects is not split.
            if action.kind is Kind.INPUT_GRAD and collected is None:
                entered = partition.backward_input(kept, gradients, keep_graph=self._keep_graph)
            else:
                entered = partition.backward(
                    kept, gradients, keep_graph=self._keep_graph, collected=collected
                )
        begin = self._record(action, place.phase, partition, begin)
        if action.kind is Kind.BACKWARD:
            self._let_go(action)
        self._routes.send_gradients(partition, entered, kept)
        if action.partition > 0:
            self._record(action, "copy", partition, begin)

    def _backward_weights(self, place: _Place, partition: Partition, action: Action) -> None:
        place.phase = "backward"
        begin = self._now(partition)
        kept = self._flight.kept[action.partition, action.micro_batch]
        with self._in_modes():
            partition.backward_weights(kept, keep_graph=self._keep_graph)
        self._record(action, place.phase, partition, begin)
        self._let_go(action)

    def _let_go(self, action: Action) -> None:
        """Drop what a visit kept; for another backward, all but the graph that can be recomputed."""
        place = (action.partition, action.micro_batch)
        if not self._keep_graph:
            del self._flight.kept[place]
        elif self._flight.kept[place].parcels is not None:
            self._flight.kept[place].roots = ()

    def _in_modes(self) -> contextlib.AbstractContextManager[object]:
        return _NO_MODES if self._modes is None else self._modes.entered()

    def _now(self, partition: Partition) -> Any:
        return None if self._recorder is None else self._recorder.now(partition.device)

    def _record(self, action: Action, phase: str, partition: Partition, begin: Any) -> Any:
        """Gives the end, where what follows begins."""
        if self._recorder is None:
            return None
        end = self._recorder.now(partition.device)
        self._recorder(action, phase, begin, end)
        return end


@final
class _Place:
    """Where a worker is, for the note on an error."""

    __slots__ = ("action", "phase")

    def __init__(self) -> None:
        self.action: Action | None = None
        self.phase = ""


def failure_note(action: Action, phase: str, whereabouts: str) -> str:
    """Where an error happened, in words."""
    note = (
        f"in partition {action.partition}, {whereabouts}, micro-batch {action.micro_batch}, "
        f"action {action} ({phase})"
    )
    if phase == "recompute":
        note += (
            ". The forward went well: what a layer keeps outside of itself may be gone by now; "
            "hand tensors from layer to layer with @skippable"
        )
    return note
