"""The devices that `gpipe plan device=...` or `devices=[a100,a100,t4]` plans for, and the costs of a model on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, final

from torch import nn

from gpipe_cli.build.step import autocast_of, with_gradient
from gpipe_cli.config.schema import PlanConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.costs import LayerCosts, TransferCost
from gpipe_cli.plan.device_costs import DeviceRun, LayerUpdate, estimate_costs
from gpipe_cli.plan.device_table import DEVICES, is_elsewhere, own_device
from gpipe_cli.plan.measured import MicroBatchSize
from gpipe_cli.plan.plan_memory import PlanMemory
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.report.output import print_status

HOST_LINK = TransferCost(0.01, 12e9)
"""Between the memory of the host and a device: what PCIe 3.0 x16 reaches."""


@final
@dataclass(frozen=True)
class EstimatedDevices:
    runs: Sequence[DeviceRun]
    """The devices of one pipeline, in order; all others are like it."""
    name: str

    @property
    def memory(self) -> list[int]:
        """Bytes of each device."""
        return [run.device.memory for run in self.runs]


@final
class EstimatedCosts:
    """Estimates the costs of a model on devices that this machine does not have."""

    def __init__(
        self,
        settings: PlanConfig,
        model: nn.Sequential,
        devices: EstimatedDevices,
        memory: PlanMemory,
        sample_of: Callable[[int], Sample],
    ) -> None:
        self._settings, self._model, self._devices = settings, model, devices
        self._memory, self._sample_of = memory, sample_of
        self._counted: tuple[int, ModelStats] | None = None
        self._costs_of_run = cache(self._estimate)
        self.origin = f"an estimate for {devices.name}, not measured"

    def prepare(self, sizes: Sequence[MicroBatchSize], deadline: float) -> list[int]:
        """Count operations once, for the smallest micro-batch that the model accepts: they grow with its rows."""
        all_rows = sorted({size.rows for size in sizes})
        print_status("counting the operations of each distinct layer")
        with autocast_of(self._settings):
            self._counted = smallest, stats = self._count(all_rows)
        self._memory.add_stats(smallest, stats)
        return [rows for rows in all_rows if rows >= smallest]

    def costs(self, rows: int, devices: int) -> LayerCosts:
        """On the first devices of the pipeline."""
        by_device = [self._costs_of_run(rows, run) for run in self._devices.runs[:devices]]
        return by_device[0] if len(set(map(id, by_device))) == 1 else LayerCosts.mixed(by_device)

    def host_transfer(self) -> TransferCost:
        return HOST_LINK

    def _estimate(self, rows: int, run: DeviceRun) -> LayerCosts:
        assert self._counted is not None, "prepare comes first"
        counted_rows, stats = self._counted
        return estimate_costs(stats, run, rows / counted_rows, *self._updates)

    @cached_property
    def _updates(self) -> tuple[list[LayerUpdate], int]:
        return layer_updates(self._model, with_gradient(self._memory.state))

    def _count(self, all_rows: Sequence[int]) -> tuple[int, ModelStats]:
        """The fewest of these rows that the model accepts, and its operations."""
        for rows in all_rows[:-1]:
            try:
                return rows, model_stats(self._model, self._sample_of(rows))
            except ValueError:
                # Batch norm, for example, rejects a micro-batch of a single row.
                continue
        return all_rows[-1], model_stats(self._model, self._sample_of(all_rows[-1]))


def estimated_devices(settings: PlanConfig) -> EstimatedDevices | None:
    """None if the devices are those of this machine."""
    given = _given(settings)
    if not given:
        return None
    specs = [
        own_device(device, key) if isinstance(device, Mapping) else DEVICES[device] for device, key in given
    ]
    replicas = settings.data_parallel
    for spec, (device, _) in zip(specs, given, strict=True):
        if (refusal := spec.refusal(settings.precision, tensor_cores=settings.tensor_cores)) is not None:
            raise ConfigError(
                f"precision={settings.precision}: {_name(device)} {refusal}; choose another precision"
            )
    # The devices of one replica follow each other, and fill a machine before the next.
    pipeline = specs[: len(specs) // replicas]
    if specs != pipeline * replicas:
        raise ConfigError(
            f"devices: data_parallel={replicas} replicas, which follow each other in the list, need equal devices"
        )
    spans_machines = len(specs) > pipeline[0].per_machine
    # Replicas, and pipelines over several machines, have a process for each device.
    any_leaves = len(pipeline) > pipeline[0].per_machine
    runs = []
    for place, spec in enumerate(pipeline):
        following = pipeline[min(place + 1, len(pipeline) - 1)]
        leaves = (place + 1) % spec.per_machine == 0 and place + 1 < len(pipeline)
        # The slower of the two devices decides how fast a tensor gets from one to the other.
        link = min(spec.network, following.network) if leaves else min(spec.link, following.link)
        runs.append(
            DeviceRun(
                replace(spec, link=link),
                settings.precision,
                settings.tensor_cores,
                replicas,
                overlaps=True,
                spans_machines=replicas > 1 and spans_machines,
                leaves_machine=leaves,
                one_process=replicas == 1 and not any_leaves,
            )
        )
    if settings.device is not None:
        return EstimatedDevices(runs, f"{len(specs)} x {_name(settings.device)}")
    return EstimatedDevices(runs, ", ".join(_name(device) for device, _ in given))


def layer_updates(
    model: nn.Sequential, trained: Callable[[nn.Parameter], int]
) -> tuple[list[LayerUpdate], int]:
    """What an update of each layer moves, and the bytes of parameters that several layers share.

    `trained` gives the bytes of a parameter with its gradient and the optimizer's state.
    """
    counted: set[nn.Parameter] = set()
    updates, shared = [], 0
    for layer in model:
        parameters = [each for each in layer.parameters() if each.requires_grad]
        shared += sum(each.nbytes for each in parameters if each in counted)
        own = [each for each in parameters if each not in counted]
        counted.update(own)
        bytes = sum(each.nbytes for each in own)
        updates.append(LayerUpdate(bytes, bytes, sum(trained(each) - 2 * each.nbytes for each in own)))
    return updates, shared


def _given(settings: PlanConfig) -> list[tuple[Any, str]]:
    """The devices as they were given, each with its key; none if they are those of this machine."""
    device, devices = settings.device, settings.devices
    if device is not None:
        return [(device, "device")] * int(devices)
    if isinstance(devices, list) and all(map(is_elsewhere, devices)):
        return [(device, f"devices[{place}]") for place, device in enumerate(devices)]
    return []


def _name(device: Any) -> str:
    return "a custom device" if isinstance(device, Mapping) else str(device)
