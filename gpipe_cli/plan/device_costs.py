"""What layers would cost on a device you need not have: the roofline model, kernel by kernel. Nothing is measured.

A kernel takes as long as the slower of its arithmetic and its memory traffic. A layer takes as long as its kernels, but
never less than it takes to launch them: the host runs ahead of the device, which waits only where the launches of a
whole layer take longer. So large matrix products depend on the figure for arithmetic, normalization and the like on
bandwidth, and small micro-batches on the number of kernels. The same efficiencies hold for every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, final

from gpipe_cli.plan.costs import BackwardSplit, LayerCosts, UpdateCosts
from gpipe_cli.plan.device_table import DeviceSpec

if TYPE_CHECKING:  # the command line is read without torch
    from gpipe_cli.profiling.model_stats import LayerOperations, ModelStats
    from gpipe_cli.torch_internals.operation_recorder import KernelCost


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
