"""How long partitions really take: beside each other, and not cut up layer by layer.

    taken = measure_phases(module, sample, balance=[14, 4], devices=[cpu, cpu], chunks=8)
    taken.backward          # milliseconds of one micro-batch, over all partitions

Layers are measured alone, each as a partition of its own. In a pipeline they share caches, memory and the interpreter
with the layers of other workers, and are not cut from one another. So a few short steps are run as a pipeline, in which
every kind of action occurs. Decides which steps; knows nothing of layers' times. The model is left as it was found.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from gpipe_cli.pipeline.gpipe import GPipe
from gpipe_cli.pipeline.microbatch import Value, tensors_of, value_like
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.profiling.left_as_found import left_as_found, staying_at_home
from gpipe_cli.profiling.record import Piece, recording
from gpipe_cli.schedule.action import Kind

__all__ = ["Phases", "measure_phases"]

PER_PARTITION = 2
"""Micro-batches of a step for each partition: enough for all workers to be busy most of the time."""
LEAST_STEPS = 2
MOST_STEPS = 50


@final
@dataclass(frozen=True)
class Phases:
    """Milliseconds of one micro-batch on all partitions together."""

    forward: float
    backward: float
    checkpointed_forward: float
    """Without a graph."""
    recompute: float
    input_grad: float
    weight_grad: float
    """The parts of a split backward, as multiples of the whole. The first partition's is never split."""


def measure_phases(
    module: nn.Sequential,
    sample: Sample,
    balance: Sequence[int],
    devices: Sequence[torch.device],
    chunks: int,
    seconds: float = 0.0,
    *,
    split: bool = True,
) -> Phases:
    """Medians of at least two steps of each kind, and of more while `seconds` last; `sample` is a micro-batch.

    Without `split` a split backward is not tried, and taken as two halves.
    """
    micro_batches = min(chunks, PER_PARTITION * len(balance))
    whole = Sample(
        _repeated(sample.input, micro_batches), _repeated_target(sample, micro_batches), sample.loss
    )

    def times(schedule: str, checkpoint: str) -> _Times:
        pipe = GPipe(
            module,
            balance,
            devices=devices,
            chunks=micro_batches,
            checkpoint=checkpoint,
            schedule=schedule,
        )
        return _pieces(pipe, whole, seconds / 3)

    with staying_at_home(module), left_as_found(module):
        plain, checkpointed = times("1f1b", "never"), times("1f1b", "always")
        halves = times("zero_bubble", "never") if split and len(balance) > 1 else {}
    later = _sum(plain, "backward", first=1) if halves else 0.0
    return Phases(
        forward=_sum(plain, "forward"),
        backward=_sum(plain, "backward"),
        checkpointed_forward=_sum(checkpointed, "forward"),
        recompute=_sum(checkpointed, "recompute"),
        input_grad=_sum(halves, "backward", Kind.INPUT_GRAD, first=1) / later if later else 0.5,
        weight_grad=_sum(halves, "backward", Kind.WEIGHT_GRAD, first=1) / later if later else 0.5,
    )


_Times = Mapping[tuple[int, str, Kind], Sequence[float]]


def _pieces(pipe: GPipe, sample: Sample, seconds: float) -> _Times:
    """Of every partition, phase and kind of action all durations, the first step's left out."""
    assert sample.loss is not None and sample.target is not None, "a step ends with a loss"
    times: dict[tuple[int, str, Kind], list[float]] = defaultdict(list)
    with pipe:
        pipe.step(sample.input, sample.target, sample.loss, key=0)
        with recording(pipe) as record:
            deadline = time.perf_counter() + seconds
            for step in range(MOST_STEPS):
                if step >= LEAST_STEPS and time.perf_counter() > deadline:
                    break
                pipe.step(sample.input, sample.target, sample.loss, key=0)
        for piece in record.pieces():
            times[_what(piece)].append(piece.end - piece.begin)
    return times


def _what(piece: Piece) -> tuple[int, str, Kind]:
    return piece.action.partition, piece.phase, piece.action.kind


def _sum(times: _Times, phase: str, kind: Kind | None = None, first: int = 0) -> float:
    """Over the partitions from `first` on."""
    return 1000 * sum(
        statistics.median(durations)
        for (partition, found, its_kind), durations in times.items()
        if found == phase and kind in (None, its_kind) and partition >= first
    )


def _repeated(value: Value, times: int) -> Value:
    return value_like(value, tuple(torch.cat([tensor] * times) for tensor in tensors_of(value)))


def _repeated_target(sample: Sample, times: int) -> Tensor | None:
    return None if sample.target is None else torch.cat([sample.target] * times)
