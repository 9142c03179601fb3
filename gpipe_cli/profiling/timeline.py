"""Steps of a pipe on the clock: who did what when, how busy every partition was, which one holds the others up.

    steps = run_steps(pipe, lambda: pipe.step(input, target, loss), least=5)
    median_step(steps).partition(0).busy

Forward, recomputation, backward and copies between devices count as busy. The rest of a worker's step is the bubble,
and the part of it between the worker's first and last piece of work is waiting for others.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch

from gpipe_cli.accelerator.devices import is_accelerator
from gpipe_cli.accelerator.streams import current_stream, record_timing_event, synchronize
from gpipe_cli.schedule.action import Action
from gpipe_cli.schedule.orders import BY_SLICE, ZERO_BUBBLE
from gpipe_cli.schedule.simulate import TRANSFERS, Simulation, Span
from gpipe_cli.schedule.spec import PipelineSpec

WARM_UP = 2
"""Steps before those that count: the first ones also pay for new threads and their memory."""

# Smaller effects are not worth mentioning: measurements on a busy machine differ as much from one run to the next.
UNEVEN = 1.05
SLOWED_DOWN = 1.15
LARGE_BUBBLE = 0.15
ABOVE_IDEAL = 0.1
MUCH_RECOMPUTATION = 0.15


IsLate = Callable[[], bool]
"""Whether the time to measure is up; a measurement then ends with the action that runs."""


def never_late() -> bool:
    return False


def late_after(seconds: float, clock: Callable[[], float] = time.monotonic) -> IsLate:
    """`seconds` from now on; with 0 there is no limit."""
    if not seconds:
        return never_late
    deadline = clock() + seconds
    return lambda: clock() >= deadline


@final
class TimeIsUp(Exception):
    """Ends a step in the middle."""


class RecordedPipe(Protocol):
    """What a recording needs of a pipe."""

    recorder: Any

    @property
    def devices(self) -> Sequence[torch.device]: ...


@contextmanager
def recording(pipe: RecordedPipe, is_late: IsLate = never_late) -> Iterator[ActionRecorder]:
    """Record the pipe's work inside the block; when it is late, the action that runs is the last one."""
    record = ActionRecorder(pipe.devices, is_late)
    pipe.recorder = record
    try:
        yield record
    finally:
        pipe.recorder = None


@final
class ActionRecorder:
    """The recorder of a pipe. All that a worker does is append to a list, which is atomic and needs no lock."""

    def __init__(self, devices: Sequence[torch.device], is_late: IsLate = never_late) -> None:
        self._is_late = is_late
        self._spans: list[tuple[Action, str, Any, Any, int]] = []
        self._accelerators = {device for device in devices if is_accelerator(device)}
        self._began = time.perf_counter()
        self.clear()

    def now(self, device: torch.device) -> Any:
        # On an accelerator a call returns before its work has run, so the moment is an event in the stream. Reading it
        # here would make the worker wait; `spans` does so when all is done.
        return record_timing_event(current_stream(device)) if is_accelerator(device) else time.perf_counter()

    def __call__(self, action: Action, phase: str, begin: Any, end: Any) -> None:
        self._spans.append((action, phase, begin, end, threading.get_native_id()))
        if self._is_late():
            raise TimeIsUp

    def spans(self) -> list[Span]:
        """In the order in which they ended; waits until the devices have run them."""
        synchronize(self._accelerators)
        return [
            Span(action, thread, self._seconds(begin), self._seconds(end), phase)
            for action, phase, begin, end, thread in self._spans
        ]

    def clear(self) -> None:
        """Forget the spans; call it before each step of a long recording, for the precision of its times."""
        self._spans.clear()
        # Events tell only the milliseconds since another event of their device, in single precision: 8 ms apart after a
        # day. So the origin moves along, and it is one moment on all devices because none of them has anything to run.
        synchronize(self._accelerators)
        self._origin = time.perf_counter()
        self._origins = {device: record_timing_event(current_stream(device)) for device in self._accelerators}

    def _seconds(self, moment: Any) -> float:
        if isinstance(moment, float):
            return moment - self._began
        return self._origin - self._began + self._origins[moment.device].elapsed_time(moment) / 1000


@final
@dataclass(frozen=True)
class PartitionTime:
    """One partition in one step: shares of the step's time, except for `waiting`, which is in seconds."""

    busy: float
    recompute: float
    """The part of `busy` that checkpointing costs."""
    bubble: float
    """The bubble of the partition's worker, which several partitions may share."""
    waiting: float


@final
@dataclass(frozen=True)
class StepTimeline:
    """One step, recorded or simulated."""

    spans: tuple[Span, ...]

    @staticmethod
    def simulated(simulation: Simulation) -> StepTimeline:
        """A simulated step in seconds, as if it had been recorded."""
        return StepTimeline(
            tuple(span._replace(begin=span.begin / 1000, end=span.end / 1000) for span in simulation.spans)
        )

    @property
    def begin(self) -> float:
        return min(span.begin for span in self.spans)

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans) - self.begin

    @property
    def bubble(self) -> float:
        """The share of all workers' time in which they do nothing."""
        workers = {span.worker for span in self.spans}
        busy = sum(_busy(span for span in self.spans if span.worker == worker) for worker in workers)
        return 1 - busy / (len(workers) * self.seconds)

    @property
    def lanes(self) -> list[list[int]]:
        """The partitions of each device, in the order of their first ones; of slices that come and go, each alone."""
        slices = any(span.phase in TRANSFERS for span in self.spans)
        workers = {
            span.action.partition: span.action.partition if slices else span.worker for span in self.spans
        }
        lanes: dict[int, list[int]] = defaultdict(list)
        for partition in sorted(workers):
            lanes[workers[partition]].append(partition)
        return list(lanes.values())

    def partition(self, index: int) -> PartitionTime:
        own = [span for span in self.spans if span.action.partition == index]
        worker = [span for span in self.spans if span.worker == own[0].worker]
        return PartitionTime(
            busy=_busy(own) / self.seconds,
            recompute=_busy(span for span in own if span.phase == "recompute") / self.seconds,
            bubble=1 - _busy(worker) / self.seconds,
            waiting=StepTimeline(tuple(worker)).seconds - _covered(worker),
        )


def run_steps(
    pipe: RecordedPipe,
    step: Callable[[], object],
    *,
    least: int,
    most: int = 0,
    seconds: float = 0.0,
    warm_up: int = WARM_UP,
    is_late: IsLate = never_late,
) -> list[StepTimeline]:
    """Record at least `least` calls of `step`, and up to `most` while `seconds` last, after the first `warm_up` calls.

    When it is late, the steps so far are all there are: the last one that warmed up, or the part of one that was run.
    """
    steps: list[StepTimeline] = []
    deadline = math.inf
    with recording(pipe, is_late) as record:
        while len(steps) < warm_up + least or (
            len(steps) < warm_up + most and time.perf_counter() <= deadline
        ):
            if len(steps) == warm_up:
                deadline = time.perf_counter() + seconds
            record.clear()
            try:
                step()
            except TimeIsUp as error:
                # The frames of its traceback hold the tensors of the step.
                traceback.clear_frames(error.__traceback__)
                return steps[warm_up:] or steps[-1:] or [StepTimeline(tuple(record.spans()))]
            # After each step, which also waits for the events of a device: steps must not overlap in the record.
            steps.append(StepTimeline(tuple(record.spans())))
    return steps[warm_up:]


def median_step(steps: Sequence[StepTimeline]) -> StepTimeline:
    # A step that really happened, not medians of its parts, whose spans would not fit together.
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def _busy(spans: Iterable[Span]) -> float:
    return _covered(span for span in spans if span.phase not in TRANSFERS)


def _covered(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of the spans runs: accelerators copy while they compute."""
    covered, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.begin):
        covered += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return covered


@final
@dataclass(frozen=True)
class Diagnosis:
    bottleneck: int
    """The partition that is busy longest."""
    advice: list[str]


@final
@dataclass(frozen=True)
class BalanceGain:
    """The predicted steps of the present balance and of the best one, by the times of the layers."""

    balance: list[int]
    step_ms: float
    best: list[int]
    best_step_ms: float

    @property
    def is_worthwhile(self) -> bool:
        return self.step_ms > UNEVEN * self.best_step_ms

    def __str__(self) -> str:
        return (
            f"balance=time: {self.best} instead of {self.balance} makes a step of {self.step_ms:.0f} ms one of "
            f"{self.best_step_ms:.0f} ms, by the times of the layers"
        )


def diagnose(
    partitions: Sequence[PartitionTime],
    spec: PipelineSpec,
    *,
    bubble: float,
    ideal_bubble: float,
    rows: int,
    gain: BalanceGain | None = None,
) -> Diagnosis:
    """`rows` is the size of a mini-batch, which bounds the number of micro-batches."""

    def advice() -> Iterator[str]:
        if spec.schedule == BY_SLICE:
            yield from _slice_advice(partitions, bubble)
            return
        splits, several = spec.traits.splits_backward, spec.traits.several_per_device
        if gain is not None and gain.is_worthwhile:
            # The other advice assumes partitions that take about as long as each other.
            yield str(gain)
            return
        if ideal_bubble > LARGE_BUBBLE and 2 * spec.micro_batches <= rows:
            yield f"chunks={2 * spec.micro_batches} shortens the bubble that any schedule has at both ends"
        if ideal_bubble > LARGE_BUBBLE and not (splits or several) and len(partitions) > 1:
            yield f"schedule={ZERO_BUBBLE} fills a part of it"
        if bubble > ideal_bubble + ABOVE_IDEAL:
            if spec.cores is not None and spec.partitions > spec.cores:
                yield f"partitions={spec.cores} is as many as there are cores: more of them take turns"
            else:
                yield "fewer chunks or a larger batch_size make pieces that take longer than passing them on"
        if max(partition.recompute for partition in partitions) > MUCH_RECOMPUTATION:
            yield "checkpoint=never saves the recomputation, if memory allows"

    busiest = max(range(len(partitions)), key=lambda index: partitions[index].busy)
    return Diagnosis(busiest, list(advice()) or ["nothing stands out"])


def compare_with_ideal(step: StepTimeline, ideal: StepTimeline, cores: int | None) -> str:
    """Why a recorded step is shorter than its ideal, or much longer; empty where there is nothing to explain.

    The ideal is what the schedule makes of the times that the layers take alone.
    """
    alone, together = (
        sum(span.end - span.begin for span in of.spans if span.phase not in TRANSFERS) for of in (ideal, step)
    )
    pace = together / alone if alone else 1.0
    if step.seconds < ideal.seconds:
        return (
            f"the step is shorter than the ideal, which is made of the times that layers take alone: in the pipeline "
            f"they took {pace:.2f} times as long"
        )
    if pace > SLOWED_DOWN:
        shared = "memory and caches" if cores is None else f"{cores} cores, memory and caches"
        return f"layers took {pace:.2f} times as long as alone, which the ideal does not know: workers share {shared}"
    return ""


def _slice_advice(slices: Sequence[PartitionTime], bubble: float) -> Iterator[str]:
    """A single worker loads and drops slices whenever it does not compute."""
    if bubble > LARGE_BUBBLE:
        yield f"a larger batch_size computes more for each load: {100 * bubble:.0f} % of the step is moving slices"
    if max(slice.recompute for slice in slices) * len(slices) > MUCH_RECOMPUTATION:
        yield "checkpoint=never saves the recomputation, if memory allows"
