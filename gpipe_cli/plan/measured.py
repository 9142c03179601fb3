"""Measures on this machine what layers cost, and how long the steps of plans take.

Small micro-batches are less efficient and workers slow each other down, so nothing is scaled: at each size of
micro-batch, the layers are measured for their shares, and a short pipeline of them for the time they take together.
"""

from __future__ import annotations

import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.accelerator.devices import (
    available_cores,
    device_name,
    free_and_total_bytes,
    intra_op_threads,
    is_accelerator,
    use_threads,
)
from gpipe_cli.accelerator.streams import median_seconds, synchronize
from gpipe_cli.balance.solver import solve
from gpipe_cli.build.step import sample_must_fit
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.gpipe import GPipe, plain_pipe
from gpipe_cli.pipeline.loss import LossFunction
from gpipe_cli.pipeline.microbatch import Value, moved
from gpipe_cli.pipeline.partitioning import move_to_devices
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.plan.costs import BackwardSplit, LayerCosts, TransferCost
from gpipe_cli.plan.prediction import Prediction
from gpipe_cli.profiling.equal_layers import LayerSample
from gpipe_cli.profiling.model_stats import ModelStats
from gpipe_cli.profiling.phase_times import PER_PARTITION, MeasuredPipeline, PhaseTimes, spread_of
from gpipe_cli.profiling.profile_cache import ProfileCache
from gpipe_cli.profiling.records import MEASURED, LayerTimes, Sample, frozen_layers, preserved
from gpipe_cli.profiling.timeline import TimeIsUp
from gpipe_cli.report.output import print_status

SECONDS_OF_PHASES = 0.6
"""For pipelines whose steps are so short that the least number of them takes less."""
LAYER_RUNS, PHASE_RUNS = 7, 15
"""How often the layers run alone and in pipelines to be measured, if a run takes long."""
LESS_EFFICIENT = 2.0
"""How many times as long a sample may take in a small micro-batch as in a large one."""
EQUALLY_GOOD = 0.03
"""Steps whose measured times differ by at most this share: it varies as much from one measurement to the next."""
BETWEEN_MACHINES = TransferCost(0.0, 12e9)
"""Not measured: the bandwidth of PCIe 3.0 x16, or of a network of 100 Gbit/s."""
MEASURING_SHARE = 0.8
"""The share of the budget for measuring; the search has the rest."""
MEASURING_ROOM = 0.8
"""The share of an accelerator's free memory for the layers that are measured; kernels need the rest while they run."""
HINT = "try a smaller batch_size, or estimate the costs: gpipe plan device=<name>"
SMALL, LARGE = 2**12, 2**24
"""Bytes: the time of a small copy is latency, the rest of a large one's bandwidth."""
MAX_ROUNDS = 15
"""In which every plan runs a step to be verified."""


@final
@dataclass(frozen=True)
class MicroBatchSize:
    rows: int
    chunks: int
    """How many such micro-batches a mini-batch has."""

    def __str__(self) -> str:
        return "one device with the whole mini-batch" if self.chunks == 1 else f"micro-batches of {self.rows}"


@final
@dataclass(frozen=True)
class MeasuredCosts:
    """Measured costs of micro-batches of one size on one kind of device."""

    layers: Sequence[LayerTimes]
    phases: PhaseTimes
    frozen_layers: int = 0
    recomputed_from: int = 0
    """The first layer of the partitions that recomputed while the phases were measured."""
    sample: LayerSample | None = None
    """Which layers of the model these are; None: all of them."""

    @property
    def is_complete(self) -> bool:
        return self.phases.spread < inf and all(layer.source == MEASURED for layer in self.layers)

    @property
    def layers_ms(self) -> float:
        """What the layers that were measured take one after the other."""
        return sum(layer.forward_ms + layer.backward_ms for layer in self.layers)

    def costs(self, transfer: Sequence[float] | None) -> LayerCosts:
        """The phases of the pipeline, divided among the layers by what they take alone."""
        phases = self.phases
        by_forward = partial(self._divided, shares=[layer.forward_ms for layer in self.layers])
        by_backward = partial(self._divided, shares=[layer.backward_ms for layer in self.layers])
        return LayerCosts(
            by_forward(phases.forward),
            by_backward(phases.backward),
            recompute=by_forward(phases.recompute, measured_from=self.recomputed_from),
            transfer=transfer,
            split=BackwardSplit(phases.input_grad, phases.weight_grad),
            checkpointed=(by_forward(phases.checkpointed_forward), by_backward(phases.checkpointed_backward)),
            frozen_layers=self.frozen_layers,
            spread=max(EQUALLY_GOOD, phases.spread),
        )

    def _divided(self, total: float, shares: Sequence[float], measured_from: int = 0) -> list[float]:
        """measured_from: the layers before it are not in the total, and get as much in proportion."""
        whole = sum(shares[measured_from:]) or 1.0
        times = [total * share / whole for share in shares]
        return times if self.sample is None else self.sample.for_all(times)


@final
class MeasuredSource:
    """The costs of a model on devices of this machine: `prepare` measures, `costs` answers from that."""

    def __init__(
        self,
        model: nn.Sequential,
        devices: Sequence[torch.device],
        *,
        sample_of: Callable[[int], Sample],
        stats_of: Callable[[int], ModelStats],
        autocast: Callable[[str], AbstractContextManager[Any]] = lambda device_type: nullcontext(),
        folder: Path | None,
        reuse: bool = True,
        apart: bool = False,
    ) -> None:
        """`sample_of` and `stats_of` give a micro-batch of so many rows, and the bytes of the layers that it passes.

        `autocast` makes the precision of the run on a type of device. `folder` has earlier measurements; with `reuse`
        they are confirmed instead of made again. `apart`: every device is a machine like this one.
        """
        self._model, self._devices, self._sample_of, self._stats_of = (
            model,
            list(devices),
            sample_of,
            stats_of,
        )
        self._autocast, self._apart = autocast, apart
        self._cores = available_cores()
        self._late_from = inf
        """From then on, only what must be known is measured."""
        self._profiles = ProfileCache(folder, reuse=reuse, warn=print_status, is_late=self._is_late)
        self._link = cache(measure_link)
        self._kinds = [device_kind(device) for device in devices]
        self._measured: dict[tuple[int, str, int], MeasuredCosts] = {}
        """The costs by rows of a micro-batch, kind of device and number of workers."""
        self.costs = cache(self._costs_at)
        """The costs on the first devices, for micro-batches of a size that was measured."""
        self.origin = ""
        """How the costs were obtained."""
        self.complete: list[int] = []
        self.rejected: list[int] = []
        """The rows of the micro-batches of which everything was measured, and of those that the model rejects."""
        self.seconds_for_all = 0.0
        """How long `prepare` takes for all sizes, judged by those that were measured."""

    def prepare(self, sizes: Sequence[MicroBatchSize], deadline: float) -> list[int]:
        """Measure in this order; the rows of the sizes that there was time for, at least the first that runs.

        `deadline` is a time of `time.monotonic`.
        """
        begin, before = time.monotonic(), _busy_seconds()
        self._late_from = begin + MEASURING_SHARE * (deadline - begin)
        with (
            self._autocast(self._devices[0].type),
            sample_must_fit(self._sample_of(min(size.rows for size in sizes))),
            use_threads(1),
            report_out_of_memory("measuring the layers on one device", HINT),
        ):
            measured = self._measure_sizes(sizes)
        outdated = self._profiles.outdated
        if outdated:
            print_status(
                f"measured again: {len(outdated)} outdated cached measurements, such as {outdated[0]}"
            )
        estimated = any(not costs.is_complete for costs in self._measured.values())
        took = time.monotonic() - begin
        self.origin = f"measured here in {took:.1f} s" + (
            ", or estimated from FLOPs where the time did not suffice" if estimated else ""
        )
        if self._profiles.oldest is not None:
            self.origin = (
                f"measured here, some of it on {self._profiles.oldest} and confirmed now; "
                "plan.cache=false measures everything again"
            )
        if before is not None and (now := _busy_seconds()) is not None:
            self.origin += (
                f"; other processes used {max(0.0, now - before) / took:.1f} of {os.cpu_count()} cores"
            )
        return measured

    @property
    def memory(self) -> list[int]:
        """Bytes of each device; none if all of them are CPUs, or if torch cannot tell."""
        if self._apart or not any(map(is_accelerator, self._devices)):
            return []
        sizes = [_bytes_of(device, self._devices) for device in self._devices]
        return [size for size in sizes if size is not None] if None not in sizes else []

    def host_transfer(self) -> TransferCost:
        """Between the memory of the host and the first device."""
        return self._link(torch.device("cpu"), self._devices[0])

    def _measure_sizes(self, sizes: Sequence[MicroBatchSize]) -> list[int]:
        measured: list[int] = []
        refused: Exception | None = None
        seconds_per_row = 0.0
        complete: dict[int, float] = {}
        """The seconds that measuring took, by rows, of the sizes of which nothing is missing."""
        for place, size in enumerate(sizes, 1):
            begin = time.monotonic()
            if measured and begin + seconds_per_row * self._rows_to_run(size) > self._late_from:
                continue
            left = max(0.0, self._late_from - begin)
            # A line of its own: each layer and pipeline of the size replaces what is shown on a terminal.
            print_status(f"measuring {size} ({place} of {len(sizes)} sizes, at most {left:.0f} s left)")
            try:
                self._measure(size)
            except TimeIsUp:
                break
            except (ValueError, RuntimeError) as error:
                # Batch norm, for example, refuses a micro-batch of a single row; larger ones may work.
                refused = error
                self.rejected.append(size.rows)
                # The frames of its traceback hold the tensors of the step, and with them the memory of the device.
                traceback.clear_frames(error.__traceback__)
                continue
            # The next size is less efficient or more, but not by much.
            took = time.monotonic() - begin
            seconds_per_row = took / self._rows_to_run(size)
            measured.append(size.rows)
            if self._is_complete(size):
                complete[size.rows] = took
        if refused is not None and not measured:
            raise refused
        if not measured:
            raise ConfigError(
                "the time to plan: too short to measure a layer with FLOPs; give a larger plan.budget, or estimate the "
                "costs: gpipe plan device=<name>"
            )
        self.complete = list(complete)
        missing = [size for size in sizes if size.rows not in (*complete, *self.rejected)]
        per_row = max(costs.layers_ms / rows for (rows, _, _), costs in self._measured.items()) / 1000
        rows = sum(map(self._rows_to_run, missing))
        self.seconds_for_all = sum(complete.values()) + LESS_EFFICIENT * per_row * rows
        return measured

    def _is_complete(self, size: MicroBatchSize) -> bool:
        """Whether all its layers, and pipelines of them, were measured."""
        return all(
            (costs := self._measured.get((size.rows, *needed))) is not None and costs.is_complete
            for needed in self._needed(size)
        )

    def _is_late(self) -> bool:
        return time.monotonic() > self._late_from

    def _transfers(self, rows: int, place: int) -> list[float] | None:
        """Milliseconds for the output of each layer from a device to the next; None: in no time."""
        source, destination = (self._devices[min(at, len(self._devices) - 1)] for at in (place, place + 1))
        if self._apart:
            link = BETWEEN_MACHINES
        elif is_accelerator(source) or is_accelerator(destination):
            link = self._link(source, destination)
        else:
            return None
        stats = self._stats_of(rows)
        return [link.ms(stats.boundary(end).bytes) for end in range(1, len(self._model) + 1)]

    def _costs_at(self, rows: int, devices: int) -> LayerCosts:
        kinds = self._kinds[:devices]
        if len(set(self._kinds)) == 1:
            return self._costs_on(rows, kinds[0], devices, 0)
        return LayerCosts.mixed(
            [self._costs_on(rows, kind, kinds.count(kind), place) for place, kind in enumerate(kinds)]
        )

    def _costs_on(self, rows: int, kind: str, workers: int, place: int) -> LayerCosts:
        counts = self._worker_counts(kind)
        measured = next((count for count in counts if count >= workers), counts[-1])
        costs, alone = self._measured[rows, kind, measured], self._measured[rows, kind, 1]
        phases = costs.phases.no_quicker_than(alone.phases)
        return replace(costs, phases=phases).costs(self._transfers(rows, place))

    def _worker_counts(self, kind: str) -> list[int]:
        """How many workers are measured together: one, as many as there are cores, and all."""
        most = 1 if self._apart else min(self._kinds.count(kind), len(self._model))
        return sorted({1, min(self._cores, most), most})

    def _needed(self, size: MicroBatchSize) -> Iterator[tuple[str, int]]:
        """The kinds of devices and the numbers of workers to measure: a single micro-batch is for one device alone."""
        for kind in dict.fromkeys(self._kinds if size.chunks > 1 else self._kinds[:1]):
            yield from ((kind, many) for many in self._worker_counts(kind) if many == 1 or size.chunks > 1)

    def _rows_to_run(self, size: MicroBatchSize) -> float:
        """About how many rows pass forward and backward through all cores to measure this size."""
        return size.rows * sum(
            LAYER_RUNS * (1 if workers == 1 else self._cores)
            + PHASE_RUNS * min(size.chunks, PER_PARTITION * workers)
            for _, workers in self._needed(size)
        )

    def _measure(self, size: MicroBatchSize) -> None:
        sample, layers = (
            self._sample_of(size.rows),
            self._stats_of(size.rows).layer_sample(room_to_measure(self._devices)),
        )
        for kind, workers in self._needed(size):
            equal = [device for device, its in zip(self._devices, self._kinds, strict=True) if its == kind]
            with use_threads(intra_op_threads(equal[:workers], self._cores)):
                self._measured[size.rows, kind, workers] = measure_costs(
                    self._model,
                    sample.to(equal[0]),
                    equal[:workers],
                    self._profiles,
                    chunks=size.chunks,
                    cores=self._cores,
                    layers=layers,
                )


def measure_costs(
    model: nn.Sequential,
    sample: Sample,
    devices: Sequence[torch.device],
    profiles: ProfileCache,
    *,
    chunks: int,
    cores: int,
    layers: LayerSample | None = None,
) -> MeasuredCosts:
    """Measure the layers one by one, and a short pipeline of them on all devices; `sample` is a micro-batch.

    `layers` are those to measure, by default all.
    """
    module = model if layers is None else layers.layers(model)
    times = profiles.times(module, sample)
    if all(layer.is_work for layer in times):
        raise TimeIsUp
    # An even balance keeps all workers busy, so that they disturb each other as they will in training.
    workers = min(len(devices), len(module))
    balance = solve([layer.forward_ms + layer.backward_ms for layer in times], workers).balance
    limit = cores if devices[0].type == "cpu" else None
    try:
        pipeline = MeasuredPipeline(module, sample, balance, devices[:workers], chunks, limit)
        phases = profiles.phases(pipeline, SECONDS_OF_PHASES)
    except TimeIsUp:
        phases = PhaseTimes.of_layers(times)
    frozen = frozen_layers(module, sample)
    begins = (begin for begin, end in pairwise([0, *accumulate(balance)]) if end > frozen)
    return MeasuredCosts(times, phases, frozen_layers(model, sample), next(begins, 0), layers)


def _busy_seconds() -> float | None:
    """The seconds that cores have spent on other processes, or other virtual machines; None if nothing says so."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, *interrupts_and_stolen = map(int, line.split()[1:9])
    ticks = user + nice + system + sum(interrupts_and_stolen)
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def device_kind(device: torch.device) -> str:
    """The kind of a device, which is equal for devices that are equally fast."""
    return device_name(device) if is_accelerator(device) else device.type


def room_to_measure(devices: Sequence[torch.device]) -> float:
    """How many bytes the layers may take that are measured on any one of the devices."""
    room = inf
    for device in filter(is_accelerator, devices):
        if (sizes := free_and_total_bytes(device)) is not None:
            # torch keeps memory that this process no longer uses, and uses it first.
            kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
            room = min(room, MEASURING_ROOM * (sizes[0] + kept))
    return room


def _bytes_of(device: torch.device, devices: Sequence[torch.device]) -> int | None:
    if not is_accelerator(device):
        # Workers on the CPU share the memory of the machine.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices.count(device)
    sizes = free_and_total_bytes(device)
    return None if sizes is None else sizes[1]


def measure_link(source: torch.device, destination: torch.device) -> TransferCost:
    """How long tensors take between two devices; between a device and itself, a copy within its memory."""
    small, large = (_copy_seconds(size, source, destination) for size in (SMALL, LARGE))
    # The clock may be too coarse for the difference of two quick copies.
    return TransferCost(1000 * small, (LARGE - SMALL) / max(large - small, 1e-9))


def _copy_seconds(bytes: int, source: torch.device, destination: torch.device) -> float:
    sent = torch.zeros(bytes, dtype=torch.uint8, device=source)
    received = torch.empty(bytes, dtype=torch.uint8, device=destination)
    return median_seconds(lambda: received.copy_(sent), (source, destination))


def verify_plans(
    plans: Sequence[Prediction],
    module: nn.Sequential,
    batch_of: Callable[[int], tuple[Value, Tensor]],
    loss: LossFunction,
    devices: Sequence[torch.device],
    *,
    cores: int,
    seconds: float,
) -> list[Prediction]:
    """The plans with the median times of their steps, or without if there was no time to run them.

    `batch_of` gives a mini-batch of a size. The plans take turns, so that whatever slows the machine down slows all of
    them; the best one and the run without a pipeline, which it is compared with, come first.
    """
    deadline = time.monotonic() + seconds
    times: list[list[float]] = [[] for _ in plans]
    batches = {plan.batch_size: batch_of(plan.batch_size) for plan in plans}
    with preserved(module, device=True), ExitStack() as stack:
        pipes = [_pipe(plan, module, devices) for plan in plans]
        for pipe in pipes:
            stack.callback(pipe.close)
        turns = sorted(
            zip(plans, pipes, times, strict=True),
            key=lambda turn: not (turn[0] is plans[0] or turn[0].is_plain),
        )
        for number in range(MAX_ROUNDS + 1):
            for plan, pipe, taken in turns:
                if time.monotonic() > deadline:
                    break
                with use_threads(intra_op_threads(devices[: plan.shape.devices], cores)):
                    seconds_taken = _step(pipe, module, batches[plan.batch_size], loss, devices)
                if number > 0:  # the first one warms up
                    taken.append(1000 * seconds_taken)
    return [
        replace(plan, measured_ms=statistics.median(taken), spread=max(EQUALLY_GOOD, spread_of(taken)))
        if taken
        else plan
        for plan, taken in zip(plans, times, strict=True)
    ]


def _pipe(plan: Prediction, module: nn.Sequential, devices: Sequence[torch.device]) -> Pipe:
    if plan.is_plain:
        return plain_pipe(module, chunks=plan.shape.chunks, device=devices[0])
    return GPipe(
        module,
        plan.balance,
        devices=devices[: plan.shape.devices],
        chunks=plan.shape.chunks,
        checkpoint=plan.shape.checkpoint,
        schedule=plan.shape.schedule,
    )


def _step(
    pipe: Pipe,
    module: nn.Module,
    batch: tuple[Value, Tensor],
    loss: LossFunction,
    devices: Sequence[torch.device],
) -> float:
    for parameter in module.parameters():
        parameter.grad = None
    # The plan before this one had the same layers on devices of its own choice.
    move_to_devices(pipe.partitions, list(pipe.partition_devices.values()))
    input, target = moved(batch[0], pipe.input_device), batch[1].to(pipe.output_device)
    # A step returns before accelerators have run it, and the copies of its input may still be under way.
    synchronize(devices)
    begin = time.perf_counter()
    pipe.step(input, target, loss, key=0)
    synchronize(devices)
    return time.perf_counter() - begin
