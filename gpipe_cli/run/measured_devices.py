"""The devices of this machine that a plan is measured on, and the costs of a model on them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from typing import final

import torch
from torch import nn

from gpipe_cli.accelerator.device_errors import report_out_of_memory
from gpipe_cli.accelerator.devices import available_cores, free_and_total_bytes, is_accelerator, use_threads
from gpipe_cli.build.step import autocast_of, sample_must_fit
from gpipe_cli.config.schema import PlanConfig, TrainConfig
from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.links import Link, measure_link
from gpipe_cli.plan.measured import CostMeasurer, MicroBatchSize
from gpipe_cli.profiling.measurements import ProfileCache, default_folder
from gpipe_cli.profiling.model_stats import ModelStats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.report.output import print_status

BETWEEN_MACHINES = Link(0.0, 12e9)
"""Not measured: the bandwidth of PCIe 3.0 x16, or of a network of 100 Gbit/s."""
MEASURING_SHARE = 0.8
"""Of the budget; the search has the rest."""
MEASURING_ROOM = 0.8
"""The share of an accelerator's free memory for the layers that are measured; kernels need the rest while they run."""
CURE = "try a smaller batch_size, or estimate the costs: gpipe plan device=<name>"


@final
class MeasuredDevices:
    def __init__(
        self,
        settings: PlanConfig | TrainConfig,
        model: nn.Sequential,
        devices: Sequence[torch.device],
        *,
        apart: bool,
        sample_of: Callable[[int], Sample],
        facts_of: Callable[[int], ModelStats],
    ) -> None:
        """`apart`: every device is a machine like this one."""
        self._settings, self._devices, self._apart = settings, list(devices), apart
        self._model, self._sample_of, self._facts_of = model, sample_of, facts_of
        self._late_from = 0.0
        self._profiles = ProfileCache(
            default_folder(), reuse=settings.plan.cache, say=print_status, is_late=self._is_late
        )
        self._link = cache(measure_link)
        self._measurer = CostMeasurer(
            model,
            sample_of,
            devices,
            self._profiles,
            cores=available_cores(),
            apart=apart,
            layers_of=lambda rows: facts_of(rows).layer_sample(room_to_measure(devices)),
            transfer_of=self._transfers,
            is_late=self._is_late,
            say=print_status,
        )
        self.origin = ""

    def prepare(self, sizes: Sequence[MicroBatchSize], deadline: float) -> list[int]:
        """Measure; the rows of those sizes for which there was time."""
        begin = time.monotonic()
        self._late_from = begin + MEASURING_SHARE * (deadline - begin)
        precision = autocast_of(self._settings, self._devices[0].type)
        smallest = min(size.rows for size in sizes)
        with (
            precision,
            sample_must_fit(self._sample_of(smallest)),
            use_threads(1),
            report_out_of_memory("measuring the layers on one device", CURE),
        ):
            measured = self._measurer.measure(sizes, self._late_from)
        outdated = self._profiles.outdated
        if outdated:
            print_status(
                f"measured again: {len(outdated)} outdated cached measurements, such as {outdated[0]}"
            )
        self.origin = f"measured here in {time.monotonic() - begin:.1f} s"
        if self._profiles.oldest is not None:
            self.origin = (
                f"measured here, some of it on {self._profiles.oldest} and confirmed now; "
                "plan.cache=false measures everything again"
            )
        return measured

    def costs(self, rows: int, devices: int) -> LayerCosts:
        return self._measurer.costs(rows, devices)

    @property
    def memory(self) -> list[int]:
        """Bytes of each device; none if all of them are CPUs, or if torch cannot tell."""
        if self._apart or not any(map(is_accelerator, self._devices)):
            return []
        sizes = [_bytes_of(device, self._devices) for device in self._devices]
        return [size for size in sizes if size is not None] if None not in sizes else []

    def host_link(self) -> Link:
        """Between the memory of the host and the first device."""
        return self._link(torch.device("cpu"), self._devices[0])

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
        facts = self._facts_of(rows)
        return [link.ms(facts.boundary(end).bytes) for end in range(1, len(self._model) + 1)]


def room_to_measure(devices: Sequence[torch.device]) -> float:
    """How many bytes the layers may take that are measured on any one of the devices."""
    room = inf
    for device in filter(is_accelerator, devices):
        if (facts := free_and_total_bytes(device)) is not None:
            # torch keeps memory that this process no longer uses, and uses it first.
            kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
            room = min(room, MEASURING_ROOM * (facts[0] + kept))
    return room


def _bytes_of(device: torch.device, devices: Sequence[torch.device]) -> int | None:
    if not is_accelerator(device):
        # Workers on the CPU share the memory of the machine.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // devices.count(device)
    facts = free_and_total_bytes(device)
    return None if facts is None else facts[1]
