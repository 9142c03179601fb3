"""The timeline of pipelined steps: recorded, and what it says of every partition.

Decides what counts as busy: forward, recomputation, backward and handing over. The rest of a worker's step is the
bubble; the part of it between its own first and last piece of work is waiting for others. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.pipeline.worked import WorkedSequence
from gpipe_cli.profiling.left_as_found import left_as_found
from gpipe_cli.profiling.record import TRANSFERS, Piece, recording

__all__ = ["PartitionTime", "Step", "median_step", "record_steps"]

WARM_UP = 2


@final
@dataclass(frozen=True)
class PartitionTime:
    """Of one partition in one step: shares of the step's time, except for `waiting` in seconds."""

    busy: float
    recompute: float
    """The part of `busy` that checkpointing costs."""
    bubble: float
    """Of the worker, which several partitions may share."""
    waiting: float


@final
@dataclass(frozen=True)
class Step:
    """One step as it was seen, or as it was simulated."""

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
        return 1 - _busy(self.pieces) / (len(threads) * self.seconds)

    def partition(self, index: int) -> PartitionTime:
        own = [piece for piece in self.pieces if piece.action.partition == index]
        worker = [piece for piece in self.pieces if piece.thread == own[0].thread]
        return PartitionTime(
            busy=_busy(own) / self.seconds,
            recompute=_busy(piece for piece in own if piece.phase == "recompute") / self.seconds,
            bubble=1 - _busy(worker) / self.seconds,
            waiting=sum(after.begin - before.end for before, after in pairwise(sorted(worker, key=_begin))),
        )


def record_steps(
    pipe: WorkedSequence, input: Value, target: Value, loss: LossFunction, steps: int
) -> list[Step]:
    """Run some steps of a whole mini-batch each; the model is left as it was found."""
    recorded = []
    with left_as_found(pipe):
        for _ in range(WARM_UP):
            pipe.step(input, target, loss, key=0)
        with recording(pipe) as record:
            for _ in range(steps):
                pipe.step(input, target, loss, key=0)
                recorded.append(Step(tuple(record.pieces())))
                record.clear()
    return recorded


def median_step(steps: Sequence[Step]) -> Step:
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def _busy(pieces: Iterable[Piece]) -> float:
    return sum(piece.end - piece.begin for piece in pieces if piece.phase not in TRANSFERS)


def _begin(piece: Piece) -> float:
    return piece.begin
