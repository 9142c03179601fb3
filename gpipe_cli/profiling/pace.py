"""How long partitions really take: beside each other, and not cut up layer by layer.

    taken = measure_phases(module, sample, balance=[14, 4], devices=[cpu, cpu], chunks=8)
    taken.backward          # milliseconds of one micro-batch, over all partitions

Layers are measured alone, each as a partition of its own. In a pipeline they share caches, memory and the interpreter
with the layers of other workers, and are not cut from one another. So a few short steps are run as a pipeline, in which
every kind of action occurs. Between actions time passes too: graphs are freed, workers wake each other. Therefore the
same steps are simulated, and what they really took beyond that is shared out among the phases: simulated again, they
take what was measured. Decides which steps; knows nothing of layers' times. The model is left as it was found.
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
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.pipeline.pytree import map_tensors
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.profiling.left_as_found import left_as_found, staying_at_home
from gpipe_cli.profiling.record import recording
from gpipe_cli.schedule import one_f_one_b, zero_bubble
from gpipe_cli.schedule.action import Kind
from gpipe_cli.schedule.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.simulate import PartitionCost

__all__ = ["Phases", "Ran", "measure_phases", "measure_plain_phases"]

PER_PARTITION = 2
"""Micro-batches of a step for each partition: enough for all workers to be busy most of the time."""
WARM_UP = 2
LEAST_STEPS = 3
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
    checkpointed_backward: float
    """After its recomputation."""
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
    cores: int | None = None,
    split: bool = True,
) -> Phases:
    """Medians of at least three steps of each kind, and of more while `seconds` last; `sample` is a micro-batch.

    `cores` is how many workers can run at once. Without `split` a split backward is not tried, and taken as two halves.
    """
    run = _Steps(module, sample, balance, devices, chunks, seconds / 3, cores).run
    with staying_at_home(module), left_as_found(module):
        plain, checkpointed = run(one_f_one_b.TRAITS.name, "never"), run(one_f_one_b.TRAITS.name, "always")
        halves = run(zero_bubble.TRAITS.name, "never") if split and len(balance) > 1 else None
    later = plain.sum("backward", first=1) if halves else 0.0
    beyond, checkpointed_beyond = plain.beyond_simulated(), checkpointed.beyond_simulated()
    return Phases(
        forward=plain.sum("forward") * beyond,
        backward=plain.sum("backward") * beyond,
        checkpointed_forward=checkpointed.sum("forward") * checkpointed_beyond,
        recompute=checkpointed.sum("recompute") * checkpointed_beyond,
        checkpointed_backward=checkpointed.sum("backward") * checkpointed_beyond,
        input_grad=halves.sum("backward", Kind.INPUT_GRAD, first=1) / later if halves and later else 0.5,
        weight_grad=halves.sum("backward", Kind.WEIGHT_GRAD, first=1) / later if halves and later else 0.5,
    )


def measure_plain_phases(
    module: nn.Sequential,
    sample: Sample,
    balance: Sequence[int],
    devices: Sequence[torch.device],
    chunks: int,
    *,
    cores: int | None = None,
) -> tuple[float, float]:
    """The forward and backward of `measure_phases` alone, from the fewest steps."""
    with staying_at_home(module), left_as_found(module):
        plain = _Steps(module, sample, balance, devices, chunks, 0.0, cores).run(
            one_f_one_b.TRAITS.name, "never"
        )
    beyond = plain.beyond_simulated()
    return plain.sum("forward") * beyond, plain.sum("backward") * beyond


@final
@dataclass(frozen=True)
class _Steps:
    """Short steps of one pipeline."""

    module: nn.Sequential
    sample: Sample
    balance: Sequence[int]
    devices: Sequence[torch.device]
    chunks: int
    seconds: float
    """For the steps of one schedule."""
    cores: int | None

    def run(self, schedule: str, checkpoint: str) -> Ran:
        sample = self.sample
        count = min(self.chunks, PER_PARTITION * len(self.balance))
        batch = Sample(_repeated(sample.input, count), _repeated_target(sample, count), sample.loss)
        pipe = GPipe(
            self.module,
            self.balance,
            devices=self.devices,
            chunks=count,
            checkpoint=checkpoint,
            schedule=schedule,
        )
        spec = PipelineSpec(schedule, len(self.balance), count, checkpoint, cores=self.cores)
        return _run(pipe, spec, batch, self.seconds)


@final
@dataclass(frozen=True)
class Ran:
    """What some steps of a spec took, in milliseconds."""

    spec: PipelineSpec
    step: float
    pieces: Mapping[tuple[int, str, Kind], float]
    """Of every partition, phase and kind of action."""

    def sum(self, phase: str, kind: Kind | None = None, first: int = 0) -> float:
        """Over the partitions from `first` on."""
        return sum(
            duration
            for (partition, found, its_kind), duration in self.pieces.items()
            if found == phase and kind in (None, its_kind) and partition >= first
        )

    def beyond_simulated(self) -> float:
        """The steps as multiples of what the simulator makes of their pieces."""
        parts = [
            PartitionCost(
                self._of(partition, "forward", Kind.FORWARD),
                self._of(partition, "backward", Kind.BACKWARD),
                recompute=self._of(partition, "recompute", Kind.BACKWARD),
            )
            for partition in range(self.spec.partitions)
        ]
        return self.step / self.spec.simulate(parts).step

    def _of(self, partition: int, phase: str, kind: Kind) -> float:
        return self.pieces.get((partition, phase, kind), 0.0)


def _run(pipe: GPipe, spec: PipelineSpec, sample: Sample, seconds: float) -> Ran:
    """Medians, without those of the first steps: new threads have new memory."""
    assert sample.loss is not None and sample.target is not None, "a step ends with a loss"
    pieces: dict[tuple[int, str, Kind], list[float]] = defaultdict(list)
    steps: list[float] = []
    with pipe:
        for _ in range(WARM_UP):
            pipe.step(sample.input, sample.target, sample.loss, key=0)
        with recording(pipe) as record:
            while len(steps) < LEAST_STEPS or (sum(steps) < seconds and len(steps) < MOST_STEPS):
                pipe.zero_grad(set_to_none=True)
                began = time.perf_counter()
                pipe.step(sample.input, sample.target, sample.loss, key=0)
                steps.append(time.perf_counter() - began)
        for piece in record.pieces():
            pieces[piece.action.partition, piece.phase, piece.action.kind].append(piece.end - piece.begin)
    medians = {what: 1000 * statistics.median(durations) for what, durations in pieces.items()}
    return Ran(spec, 1000 * statistics.median(steps), medians)


def _repeated(value: Value, times: int) -> Value:
    return map_tensors(lambda tensor: torch.cat([tensor] * times), value)


def _repeated_target(sample: Sample, times: int) -> Tensor | None:
    return None if sample.target is None else torch.cat([sample.target] * times)
