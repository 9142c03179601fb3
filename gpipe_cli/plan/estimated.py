"""The devices that `gpipe plan device=...` or `devices=[a100,a100,t4]` plans for, and what a model costs on them.

Nothing is measured, since you need not have such a device: the costs follow from the makers' figures by the roofline
model, kernel by kernel. A kernel takes as long as the slower of its arithmetic and its memory traffic. A layer takes as
long as its kernels, but never less than it takes to launch them: the host runs ahead of the device, which waits only
where the launches of a whole layer take longer. So large matrix products depend on the figure for arithmetic,
normalization and the like on bandwidth, and small micro-batches on the number of kernels. The same efficiencies hold
for every device but for tensor cores that are known to sustain another share of their figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, final

from torch import nn

from gpipe_cli.activity import activity
from gpipe_cli.build.step import autocast_of, with_gradient
from gpipe_cli.config.schema import PlanConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.plan.costs import BackwardSplit, LayerCosts, TransferCost, UpdateCosts
from gpipe_cli.plan.device_table import DEVICES, DeviceSpec, checked_against, is_elsewhere, own_device
from gpipe_cli.plan.measured import MicroBatchSize
from gpipe_cli.plan.plan_memory import PlanMemory
from gpipe_cli.profiling.model_stats import LayerOperations, ModelStats, model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.torch_internals.operation_recorder import KernelCost

HOST_LINK = TransferCost(0.01, 12e9)
"""Between the memory of the host and a device: what PCIe 3.0 x16 reaches."""


@final
@dataclass(frozen=True)
class Efficiency:
    """What software reaches of the makers' figures."""

    matrix: float = 0.8
    """What large matrix products and convolutions reach of the figure for arithmetic: cuBLAS has about 250 of an
    A100's 312 TFLOPS in fp16."""
    attention: float = 0.6
    """What attention in one kernel reaches: FlashAttention-2 has 170 to 190 TFLOPS for both ways on an A100."""
    unaligned: float = 0.34
    """The share of `matrix` on tensor cores if a size is no multiple of 8, as GPT-2's vocabulary of 50,257:
    fitted to the published iterations of GPT on A100s."""
    bandwidth: float = 0.6
    """What kernels reach of the memory's figure: fitted to the same."""
    launch_ms: float = 0.056
    """For Python, autograd and the driver to launch one kernel: fitted to the same."""
    start_ms: float = 0.005
    """What a kernel takes on the device however little it does, as an empty one on an A100."""
    link: float = 0.75
    """What copies and NCCL's rings reach of a link's figure: 225 of an A100's 300 GB/s."""
    link_ms: float = 0.01
    """Latency of one message within a machine, as of NCCL over NVLink."""
    network_ms: float = 0.02
    """Latency of one message between two machines."""


@final
@dataclass(frozen=True)
class DeviceRun:
    """How a device computes."""

    device: DeviceSpec
    precision: str = "fp32"
    tensor_cores: bool = True
    replicas: int = 1
    """Pipelines that sum their gradients."""
    overlaps: bool = False
    """Whether they do so while the last backward still runs."""
    spans_machines: bool = False
    """Whether a replica is on another machine."""
    leaves_machine: bool = False
    """Whether the next device of the pipeline is on another machine."""
    one_process: bool = False
    """Whether one process launches the kernels of all devices of the pipeline, as engine=threads does."""
    reached: Efficiency = Efficiency()

    def kernel_ms(self, operation: KernelCost, scale: float = 1.0) -> float:
        traffic = (scale * operation.activation_bytes + operation.weight_bytes) / self._bandwidth
        return self.reached.start_ms + 1000 * max(scale * operation.flops / self._flops(operation), traffic)

    def layer_ms(self, kernels: Sequence[float]) -> float:
        """How long one layer takes in one direction, from the durations of its kernels."""
        return max(self.reached.launch_ms * len(kernels), sum(kernels))

    def moving_ms(self, bytes: float) -> float:
        """To read or write its own memory."""
        return 1000 * bytes / self._bandwidth

    def transfer_ms(self, bytes: float) -> float:
        """To send a message to the next device."""
        latency = self.reached.network_ms if self.leaves_machine else self.reached.link_ms
        return latency + 1000 * bytes / (self.reached.link * self.device.link)

    def all_reduce_ms(self, bytes: float) -> float:
        """Around a ring of all replicas: each sends the whole twice, but for its own share."""
        turns = 2 * (self.replicas - 1)
        link = self.device.network if self.spans_machines else self.device.link
        return 1000 * bytes * turns / self.replicas / (self.reached.link * link)

    @property
    def _bandwidth(self) -> float:
        return self.reached.bandwidth * self.device.bandwidth

    def _flops(self, operation: KernelCost) -> float:
        figure, on_tensor_cores = self.device.matrix_flops(
            self.precision, half=operation.half, tensor_cores=self.tensor_cores
        )
        if on_tensor_cores and self.device.tensor and self.device.sustained:
            figure *= self.device.sustained / self.device.tensor / self.reached.matrix
        if operation.is_attention:
            return self.reached.attention * figure
        aligned = operation.aligned or not on_tensor_cores
        return self.reached.matrix * figure * (1.0 if aligned else self.reached.unaligned)


@final
@dataclass(frozen=True)
class LayerUpdate:
    """How much the update of one layer reads and writes."""

    parameters: int
    gradients: int
    optimizer: int
    """Its state."""

    @property
    def update(self) -> int:
        """Parameters and state are read and written, gradients read."""
        return 2 * self.parameters + self.gradients + 2 * self.optimizer


def estimate_costs(
    stats: ModelStats,
    run: DeviceRun,
    scale: float = 1.0,
    trained: Sequence[LayerUpdate] = (),
    shared_bytes: int = 0,
) -> LayerCosts:
    """The costs of a micro-batch with `scale` times the rows of the one the statistics are of.

    `trained` is one per layer, or nothing to leave the update out; `shared_bytes` are the gradients of parameters that
    several layers share.
    """
    # Equal layers have the very same operations.
    layer_ms = cache(partial(_layer_ms, run, scale))
    times = [layer_ms(layer) for layer in stats.operations]
    forward, backward = [layer.forward for layer in times], [layer.backward for layer in times]
    share = sum(layer.weight_grad for layer in times) / sum(backward) if any(backward) else 0.5
    return LayerCosts(
        forward,
        backward,
        transfer=[run.transfer_ms(scale * stats.boundary(end).bytes) for end in range(1, len(forward) + 1)],
        split=BackwardSplit(1 - share, share),
        frozen_layers=stats.frozen_layers,
        update=update_costs(run, trained, shared_bytes) if trained else None,
        host=[run.reached.launch_ms * len(layer.forward) for layer in stats.operations]
        if run.one_process
        else None,
    )


class _LayerMs(NamedTuple):
    forward: float
    backward: float
    weight_grad: float
    """The part of the backward that computes gradients of parameters."""


def _layer_ms(run: DeviceRun, scale: float, layer: LayerOperations) -> _LayerMs:
    kernels = [run.kernel_ms(each, scale) for each in layer.backward]
    weight_grad = sum(ms * each.weight_grad for ms, each in zip(kernels, layer.backward, strict=True))
    backward = run.layer_ms(kernels)
    return _LayerMs(
        run.layer_ms([run.kernel_ms(each, scale) for each in layer.forward]),
        backward,
        weight_grad * backward / sum(kernels) if kernels else 0.0,
    )


def update_costs(run: DeviceRun, trained: Sequence[LayerUpdate], shared_bytes: int) -> UpdateCosts:
    return UpdateCosts(
        [run.moving_ms(layer.update) for layer in trained],
        [run.all_reduce_ms(layer.gradients) for layer in trained],
        overlaps=run.overlaps,
        shared=run.transfer_ms(shared_bytes) if shared_bytes else 0.0,
    )


@final
@dataclass(frozen=True)
class EstimatedDevices:
    runs: Sequence[DeviceRun]
    """The devices of one pipeline, in order; all others are like it."""
    name: str
    checked: Mapping[str, str]
    """What the figures of each kind of device were checked against."""

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
        """How the costs were obtained."""
        self.complete: list[int] = []
        self.rejected: list[int] = []
        """The rows of the micro-batches whose costs are known, and of those that the model rejects."""
        self.seconds_for_all = 0.0
        """How long `prepare` takes for all sizes."""

    def prepare(self, sizes: Sequence[MicroBatchSize], deadline: float) -> list[int]:
        """Count operations once, for the smallest micro-batch that the model accepts: they grow with its rows."""
        all_rows = sorted({size.rows for size in sizes})
        began = time.monotonic()
        activity.now("counting the operations of each distinct layer")
        with autocast_of(self._settings):
            self._counted = smallest, stats = self._count(all_rows)
        self._memory.add_stats(smallest, stats)
        self.rejected = [rows for rows in all_rows if rows < smallest]
        self.seconds_for_all = time.monotonic() - began
        self.complete = [rows for rows in all_rows if rows >= smallest]
        return self.complete

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
    names = [_name(device) for device, _ in given]
    checked = {name: checked_against(device) for name, (device, _) in zip(names, given, strict=True)}
    together = f"{len(specs)} x {names[0]}" if settings.device is not None else ", ".join(names)
    return EstimatedDevices(runs, together, checked)


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
    if not isinstance(device, Mapping):
        return str(device)
    return f"{device['name']} with other figures" if "name" in device else "a custom device"
