"""How long partitions take beside each other, in a pipeline, instead of layer by layer.

    pipeline = MeasuredPipeline(module, sample, balance=[14, 4], devices=[cpu, cpu], chunks=8)
    times = pipeline.phase_times()
    times.backward          # milliseconds of one micro-batch, over all partitions

Layers are measured alone, each as a partition of its own. In a pipeline they share caches, memory and the interpreter
with the layers of other workers, and follow each other without a boundary. So this file runs a few short steps as a
pipeline, in which every kind of action occurs. Time also passes between actions: graphs are freed, workers wake each
other. Therefore it simulates the same steps and distributes the excess of the real steps over the phases: simulated
again, they take what was measured. The model is unchanged afterwards.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import final

import torch
from torch import nn

from gpipe_cli.accelerator.streams import synchronize
from gpipe_cli.pipeline.gpipe import GPipe, plain_pipe
from gpipe_cli.pipeline.microbatch import Value
from gpipe_cli.pipeline.partitioning import move_to_devices
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.profiling.records import LayerTimes, Sample, frozen_layers, preserved
from gpipe_cli.profiling.timeline import IsLate, TimeIsUp, never_late, run_steps
from gpipe_cli.pytree import map_tensors
from gpipe_cli.schedule.action import Kind
from gpipe_cli.schedule.orders import ONE_F_ONE_B, ZERO_BUBBLE
from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec

PER_PARTITION = 4
"""Micro-batches of a step for each partition: with fewer, what happens once in a step, such as waking up the workers,
would count as part of every micro-batch."""
LEAST_STEPS = 3
MAX_MEASURED_STEPS = 50


@final
@dataclass(frozen=True)
class PhaseTimes:
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
    """The parts of a split backward, as multiples of the whole. The first trained partition's is never split."""
    spread: float
    """By what share steps that do the same differed; infinite if fewer than two of them were run."""

    def no_quicker_than(self, alone: PhaseTimes) -> PhaseTimes:
        """Scaled until forward and backward take as long as on one worker with all cores, if they took less.

        Several workers do no less work than one. If it seems so, something disturbed the measurements by that much.
        """
        ratio = (alone.forward + alone.backward) / (self.forward + self.backward)
        if ratio <= 1:
            return self
        phases = ("forward", "backward", "checkpointed_forward", "recompute", "checkpointed_backward")
        scaled = {phase: ratio * getattr(self, phase) for phase in phases}
        return replace(self, **scaled, spread=max(self.spread, alone.spread, ratio - 1))

    @staticmethod
    def of_layers(layers: Sequence[LayerTimes]) -> PhaseTimes:
        """Without a measurement: the layers take as long together as each of them alone."""
        forward = sum(layer.forward_ms for layer in layers)
        backward = sum(layer.backward_ms for layer in layers)
        return PhaseTimes(forward, backward, forward, forward, backward, 0.5, 0.5, inf)


def spread_of(times: Sequence[float]) -> float:
    """The range of the middle half of the times, as a share of their median; infinite for a single one."""
    if len(times) < 2:
        return inf
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return (third - first) / median


@final
@dataclass(frozen=True)
class StepTimes:
    """What the steps of a pipeline took, in milliseconds."""

    spec: PipelineSpec
    step: float
    spread: float
    pieces: Mapping[tuple[int, str, Kind], float]
    """By partition, phase and kind of action."""

    def sum(self, phase: str, kind: Kind | None = None, first: int = 0) -> float:
        """Over the partitions from `first` on."""
        return sum(
            duration
            for (partition, its_phase, its_kind), duration in self.pieces.items()
            if its_phase == phase and kind in (None, its_kind) and partition >= first
        )

    def excess(self) -> float:
        """The measured step as a multiple of what the simulator makes of its pieces."""

        def duration(partition: int, phase: str, kind: Kind) -> float:
            return self.pieces.get((partition, phase, kind), 0.0)

        costs = [
            PartitionCost(
                duration(partition, "forward", Kind.FORWARD),
                duration(partition, "backward", Kind.BACKWARD),
                recompute=duration(partition, "recompute", Kind.BACKWARD),
            )
            for partition in range(self.spec.partitions)
        ]
        return self.step / self.spec.simulate(costs).step


@final
@dataclass(frozen=True)
class MeasuredPipeline:
    """A pipeline that runs a few short steps."""

    module: nn.Sequential
    sample: Sample
    """A micro-batch."""
    balance: Sequence[int]
    devices: Sequence[torch.device]
    chunks: int
    cores: int | None = None
    """How many workers can run at once."""

    def phase_times(
        self, seconds: float = 0.0, *, split: bool = True, is_late: IsLate = never_late
    ) -> PhaseTimes:
        """Medians of at least three steps of each kind, and of more until `seconds` have passed.

        Without `split` a split backward is assumed to be two halves. Raises `TimeIsUp` if it is late before a step of
        each kind has ended.
        """
        with preserved(self.module, device=True):
            plain = self._run(ONE_F_ONE_B, "never", seconds / 3, is_late)
            checkpointed = self._run(ONE_F_ONE_B, "always", seconds / 3, is_late)
            splits = split and len(self.balance) > 1
            halves = self._run(ZERO_BUBBLE, "never", seconds / 3, is_late) if splits else None
        # A partition is split only if the one before it waits for the gradient of its input.
        frozen, ends = frozen_layers(self.module, self.sample), accumulate(self.balance)
        first = next((at for at, begin in enumerate(ends, 1) if begin > frozen), len(self.balance))
        whole = plain.sum("backward", first=first) if halves else 0.0
        # One factor for all phases of a kind of step: the time between actions cannot be attributed to any of them.
        excess, checkpointed_excess = plain.excess(), checkpointed.excess()
        return PhaseTimes(
            forward=plain.sum("forward") * excess,
            backward=plain.sum("backward") * excess,
            checkpointed_forward=checkpointed.sum("forward") * checkpointed_excess,
            recompute=checkpointed.sum("recompute") * checkpointed_excess,
            checkpointed_backward=checkpointed.sum("backward") * checkpointed_excess,
            input_grad=halves.sum("backward", Kind.INPUT_GRAD, first) / whole if halves and whole else 0.5,
            weight_grad=halves.sum("backward", Kind.WEIGHT_GRAD, first) / whole if halves and whole else 0.5,
            spread=max(steps.spread for steps in (plain, checkpointed, halves) if steps is not None),
        )

    def forward_and_backward(self, is_late: IsLate = never_late) -> float:
        """Only the sum of these two phases, from the fewest steps."""
        with preserved(self.module, device=True):
            plain = self._run(ONE_F_ONE_B, "never", 0.0, is_late)
        return (plain.sum("forward") + plain.sum("backward")) * plain.excess()

    def _run(self, schedule: str, checkpoint: str, seconds: float, is_late: IsLate) -> StepTimes:
        """Medians, without those of the first steps: new threads have to allocate their memory."""
        loss, target = self.sample.loss, self.sample.target
        assert loss is not None and target is not None, "a step ends with a loss"
        count = min(self.chunks, PER_PARTITION * len(self.balance))
        input, target = _repeated(self.sample.input, count), torch.cat([target] * count)
        took: list[float] = []
        with self._pipe(count, schedule, checkpoint) as pipe:
            target = target.to(pipe.output_device)

            def step() -> None:
                # A training step begins without gradients; adding to old ones would cost another pass over all
                # parameters.
                pipe.zero_grad(set_to_none=True)
                synchronize(self.devices)
                began = time.perf_counter()
                pipe.step(input, target, loss, key=0)
                # A step returns before accelerators have run it.
                synchronize(self.devices)
                took.append(time.perf_counter() - began)

            steps = run_steps(
                pipe,
                step,
                least=LEAST_STEPS,
                most=MAX_MEASURED_STEPS,
                seconds=seconds,
                is_late=is_late,
            )
        durations: dict[tuple[int, str, Kind], list[float]] = defaultdict(list)
        for span in (span for recorded in steps for span in recorded.spans):
            durations[span.action.partition, span.phase, span.action.kind].append(span.end - span.begin)
        if not took:  # not even one step has ended
            raise TimeIsUp
        medians = {place: 1000 * statistics.median(seconds) for place, seconds in durations.items()}
        spec = PipelineSpec(schedule, len(self.balance), count, checkpoint, cores=self.cores)
        counted = took[-len(steps) :]
        return StepTimes(spec, 1000 * statistics.median(counted), spread_of(counted), medians)

    def _pipe(self, chunks: int, schedule: str, checkpoint: str) -> Pipe:
        if len(self.balance) > 1:
            return GPipe(
                self.module,
                self.balance,
                devices=self.devices,
                chunks=chunks,
                checkpoint=checkpoint,
                schedule=schedule,
            )
        # In the calling thread, as engine=single runs: OpenMP gives every thread its own team, and as soon as there are
        # more teams than cores for them, all of them sleep between two operators instead of spinning.
        move_to_devices([self.module], self.devices)
        return plain_pipe(self.module, chunks=chunks, checkpoint=checkpoint, device=self.devices[0])


def _repeated(value: Value, times: int) -> Value:
    return map_tensors(lambda tensor: torch.cat([tensor] * times), value)
