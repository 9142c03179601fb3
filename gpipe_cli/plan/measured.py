"""Measure what layers cost on this machine.

Small micro-batches are less efficient and workers slow each other down, so nothing is scaled: at each size of
micro-batch, the layers are measured for their shares, and a short pipeline of them for the time they take together.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import nn

from gpipe_cli.accelerator.devices import device_name, intra_op_threads, is_accelerator, use_threads
from gpipe_cli.balance.solver import solve
from gpipe_cli.plan.costs import BackwardSplit, LayerCosts
from gpipe_cli.profiling.measurements import ProfileCache
from gpipe_cli.profiling.phase_times import PER_PARTITION, PhaseTimes
from gpipe_cli.profiling.records import LayerTimes, Sample, frozen_layers
from gpipe_cli.profiling.timeline import IsLate, never_late
from gpipe_cli.sequential.equal_layers import LayerSample

SECONDS_OF_PHASES = 0.6
"""For pipelines whose steps are so short that the least number of them takes less."""
LAYER_RUNS, PHASE_RUNS = 7, 15
"""How often the layers run alone and in pipelines to be measured, if a run takes long."""


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
    """Of micro-batches of one size on one kind of device."""

    layers: Sequence[LayerTimes]
    phases: PhaseTimes
    frozen_layers: int = 0
    recomputed_from: int = 0
    """The first layer of the partitions that recomputed while the phases were measured."""
    sample: LayerSample | None = None
    """Which layers of the model these are; None: all of them."""

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
        )

    def _divided(self, total: float, shares: Sequence[float], measured_from: int = 0) -> list[float]:
        """measured_from: the layers before it are not in the total, and get as much in proportion."""
        whole = sum(shares[measured_from:]) or 1.0
        times = [total * share / whole for share in shares]
        return times if self.sample is None else self.sample.for_all(times)


@final
class CostMeasurer:
    """`measure` measures, `costs` answers from what it has measured."""

    def __init__(
        self,
        module: nn.Sequential,
        sample_of: Callable[[int], Sample],
        devices: Sequence[torch.device],
        profiles: ProfileCache,
        *,
        cores: int,
        apart: bool = False,
        layers_of: Callable[[int], LayerSample | None] = lambda rows: None,
        transfer_of: Callable[[int, int], Sequence[float] | None] = lambda rows, place: None,
        is_late: IsLate = never_late,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`sample_of` and `layers_of` give a micro-batch of so many rows, and the layers to measure with it.

        `transfer_of` is how long each layer's output takes from the device at a place to the next one. `apart`: every
        device is a machine like this one. From when on it `is_late`, only what must be known is measured. `say`
        receives a line about what is measured next.
        """
        self._module, self._sample_of, self._devices = module, sample_of, list(devices)
        self._profiles, self._cores, self._apart = profiles, cores, apart
        self._layers_of, self._transfer_of = layers_of, transfer_of
        self._is_late, self._say = is_late, say
        self._kinds = [device_kind(device) for device in devices]
        self._measured: dict[tuple[int, str, int], MeasuredCosts] = {}
        """By rows of a micro-batch, kind of device and number of workers."""
        self._costs = cache(self._costs_at)

    def measure(self, sizes: Sequence[MicroBatchSize], deadline: float) -> list[int]:
        """Measure in this order; the rows of the sizes that there was time for, at least the first that runs.

        `deadline` is a time of `time.monotonic`.
        """
        measured: list[int] = []
        refused: Exception | None = None
        seconds_per_row = 0.0
        for place, size in enumerate(sizes, 1):
            begin = time.monotonic()
            if measured and begin + seconds_per_row * self._rows_to_run(size) > deadline:
                continue
            self._say(
                f"measuring {size} ({place} of {len(sizes)} sizes, at most {max(0.0, deadline - begin):.0f} s left)"
            )
            try:
                self._measure(size)
            except (ValueError, RuntimeError) as error:
                # Batch norm, for example, refuses a micro-batch of a single row; larger ones may work.
                refused = error
                # The frames of its traceback hold the tensors of the step, and with them the memory of the device.
                traceback.clear_frames(error.__traceback__)
                continue
            # The next size is less efficient or more, but not by much.
            seconds_per_row = (time.monotonic() - begin) / self._rows_to_run(size)
            measured.append(size.rows)
        if refused is not None and not measured:
            raise refused
        return measured

    def costs(self, rows: int, devices: int) -> LayerCosts:
        """Of the first devices, for micro-batches of a size that was measured."""
        return self._costs(rows, devices)

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
        return self._measured[rows, kind, measured].costs(self._transfer_of(rows, place))

    def _worker_counts(self, kind: str) -> list[int]:
        """How many workers are measured together: one, as many as there are cores, and all."""
        most = 1 if self._apart else min(self._kinds.count(kind), len(self._module))
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
        sample, layers = self._sample_of(size.rows), self._layers_of(size.rows)
        for kind, workers in self._needed(size):
            equal = [device for device, its in zip(self._devices, self._kinds, strict=True) if its == kind]
            with use_threads(intra_op_threads(equal[:workers], self._cores)):
                self._measured[size.rows, kind, workers] = measure_costs(
                    self._module,
                    sample.to(equal[0]),
                    equal[:workers],
                    self._profiles,
                    chunks=size.chunks,
                    cores=self._cores,
                    layers=layers,
                    is_late=self._is_late,
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
    is_late: IsLate = never_late,
) -> MeasuredCosts:
    """Measure the layers one by one, and a short pipeline of them on all devices; `sample` is a micro-batch.

    `layers` are those to measure, by default all.
    """
    module = model if layers is None else layers.layers(model)
    times = profiles.times(module, sample, seconds=0.0)
    # An even balance keeps all workers busy, so that they disturb each other as they will in training.
    workers = min(len(devices), len(module))
    balance = solve([layer.forward_ms + layer.backward_ms for layer in times], workers).balance
    if is_late():
        phases = PhaseTimes.of_layers(times)
    else:
        limit = cores if devices[0].type == "cpu" else None
        phases = profiles.phases(
            module, sample, balance, devices[:workers], chunks, SECONDS_OF_PHASES, cores=limit
        )
    frozen = frozen_layers(module, sample)
    begins = (begin for begin, end in pairwise([0, *accumulate(balance)]) if end > frozen)
    return MeasuredCosts(times, phases, frozen_layers(model, sample), next(begins, 0), layers)


def device_kind(device: torch.device) -> str:
    """The same for devices that are equally fast."""
    return device_name(device) if is_accelerator(device) else device.type
