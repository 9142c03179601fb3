"""The timeline of recorded steps: how busy every partition was, which one holds the others up, and what to try.

Forward, recomputation, backward and copies between devices count as busy. The rest of a worker's step is the bubble,
and the part of it between the worker's first and last piece of work is waiting for others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from gpipe_cli.pipeline.gpipe import ThreadedPipe
from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.profiling.action_recorder import TRANSFERS, Piece, recording
from gpipe_cli.profiling.layers import preserved
from gpipe_cli.schedule import by_slice, zero_bubble
from gpipe_cli.schedule.pipeline_spec import PipelineSpec

WARM_UP = 2

# Smaller effects are not worth mentioning: measurements on a busy machine differ as much from one run to the next.
UNEVEN = 1.05
SLOWED_DOWN = 1.15
LARGE_BUBBLE = 0.15
ABOVE_IDEAL = 0.1
MUCH_RECOMPUTATION = 0.15


@final
@dataclass(frozen=True)
class PartitionTime:
    """One partition in one step: shares of the step's time, except for `waiting`, which is in seconds."""

    busy: float
    recompute: float
    """The part of `busy` that checkpointing costs."""
    bubble: float
    """Of the worker, which several partitions may share."""
    waiting: float


@final
@dataclass(frozen=True)
class StepTimeline:
    """One step, recorded or simulated."""

    pieces: tuple[Piece, ...]

    @property
    def begin(self) -> float:
        return min(piece.begin for piece in self.pieces)

    @property
    def seconds(self) -> float:
        return max(piece.end for piece in self.pieces) - self.begin

    @property
    def bubble(self) -> float:
        """The share of all workers' time in which they do nothing."""
        threads = {piece.thread for piece in self.pieces}
        busy = sum(_busy(piece for piece in self.pieces if piece.thread == thread) for thread in threads)
        return 1 - busy / (len(threads) * self.seconds)

    def partition(self, index: int) -> PartitionTime:
        own = [piece for piece in self.pieces if piece.action.partition == index]
        worker = [piece for piece in self.pieces if piece.thread == own[0].thread]
        return PartitionTime(
            busy=_busy(own) / self.seconds,
            recompute=_busy(piece for piece in own if piece.phase == "recompute") / self.seconds,
            bubble=1 - _busy(worker) / self.seconds,
            waiting=StepTimeline(tuple(worker)).seconds - _covered(worker),
        )


def record_steps(
    pipe: ThreadedPipe, input: Value, target: Value, loss: LossFunction, steps: int
) -> list[StepTimeline]:
    """Run some steps of a whole mini-batch each; the model is unchanged afterwards."""
    recorded = []
    with preserved(pipe):
        for _ in range(WARM_UP):
            pipe.step(input, target, loss, key=0)
        with recording(pipe) as record:
            for _ in range(steps):
                pipe.step(input, target, loss, key=0)
                # After each step, which also waits for the events of a device: steps must not overlap in the record.
                recorded.append(StepTimeline(tuple(record.pieces())))
                record.clear()
    return recorded


def median_step(steps: Sequence[StepTimeline]) -> StepTimeline:
    # A step that really happened, not medians of its parts, whose pieces would not fit together.
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def _busy(pieces: Iterable[Piece]) -> float:
    return _covered(piece for piece in pieces if piece.phase not in TRANSFERS)


def _covered(pieces: Iterable[Piece]) -> float:
    """Seconds in which at least one of the pieces runs: accelerators copy while they compute."""
    covered, until = 0.0, -math.inf
    for piece in sorted(pieces, key=lambda piece: piece.begin):
        covered += max(0.0, piece.end - max(piece.begin, until))
        until = max(until, piece.end)
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
    busiest = max(range(len(partitions)), key=lambda index: partitions[index].busy)
    advice = list(_advice(partitions, spec, bubble, ideal_bubble, rows, gain))
    return Diagnosis(busiest, advice or ["nothing stands out"])


def compare_with_ideal(step: StepTimeline, ideal: StepTimeline, cores: int | None) -> str:
    """Why a recorded step is shorter than its ideal, or much longer; empty where there is nothing to explain.

    The ideal is what the schedule makes of the times that the layers take alone.
    """
    alone, together = (
        sum(piece.end - piece.begin for piece in of.pieces if piece.phase not in TRANSFERS)
        for of in (ideal, step)
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


def _advice(
    partitions: Sequence[PartitionTime],
    spec: PipelineSpec,
    bubble: float,
    ideal_bubble: float,
    rows: int,
    gain: BalanceGain | None,
) -> Iterator[str]:
    if spec.schedule == by_slice.TRAITS.name:
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
        yield f"schedule={zero_bubble.TRAITS.name} fills a part of it"
    if bubble > ideal_bubble + ABOVE_IDEAL:
        if spec.cores is not None and spec.partitions > spec.cores:
            yield f"partitions={spec.cores} is as many as there are cores: more of them take turns"
        else:
            yield "fewer chunks or a larger batch_size make pieces that take longer than passing them on"
    if max(partition.recompute for partition in partitions) > MUCH_RECOMPUTATION:
        yield "checkpoint=never saves the recomputation, if memory allows"


def _slice_advice(slices: Sequence[PartitionTime], bubble: float) -> Iterator[str]:
    """A single worker loads and drops slices whenever it does not compute."""
    if bubble > LARGE_BUBBLE:
        yield f"a larger batch_size computes more for each load: {100 * bubble:.0f} % of the step is moving slices"
    if max(slice.recompute for slice in slices) * len(slices) > MUCH_RECOMPUTATION:
        yield "checkpoint=never saves the recomputation, if memory allows"
