"""Balance by size: the partition that needs the most memory needs as little as possible.

Nothing runs: the bytes come from fake tensors, so you need not have the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from torch import nn

from gpipe_cli.accelerator.devices import Device, device_here
from gpipe_cli.balance.memory_objective import MemoryObjective
from gpipe_cli.balance.result import BalanceResult, either_order, solve_within
from gpipe_cli.balance.solver import require_layers
from gpipe_cli.pipeline.microbatch import Value, tensors_of
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.profiling.records import LayerMemory, Sample
from gpipe_cli.pytree import map_tensors
from gpipe_cli.schedule.spec import PipelineSpec

TrainedBytes = Callable[[nn.Parameter], int]
"""The bytes of a trained parameter: itself, its gradient and the optimizer's state."""


def balance(memory: MemoryObjective, partitions: int) -> BalanceResult:
    solution = solve_within(memory, partitions, memory)
    return BalanceResult.of(solution.balance, memory.costs, "bytes", solution.largest, memory)


def memory_objective(
    module: nn.Sequential, sample: Sample, spec: PipelineSpec, trained: TrainedBytes, limit: int | None = None
) -> MemoryObjective:
    """What partitions of the module need for micro-batches like the sample."""
    return memory_objective_of(module, model_stats(module, sample, count_flops=False), spec, trained, limit)


def memory_objective_of(
    module: nn.Sequential,
    stats: ModelStats,
    spec: PipelineSpec,
    trained: TrainedBytes,
    limit: int | None = None,
    limits: Sequence[int] = (),
) -> MemoryObjective:
    """What partitions need, from a micro-batch's stats; `limits` are those of devices that differ."""
    inputs = [stats.input.bytes, *(layer.output_bytes for layer in stats.layers[:-1])]
    layers = [
        LayerMemory(_resident(layer, trained), input, saved)
        for layer, input, saved in zip(module, inputs, stats.storages, strict=True)
    ]
    return MemoryObjective(
        layers,
        spec,
        limit,
        stats.skips,
        stats.frozen_layers,
        limits,
    )


def _resident(layer: nn.Module, trained: TrainedBytes) -> dict[int, int]:
    parameters = {
        id(parameter): trained(parameter) if parameter.requires_grad else parameter.nbytes
        for parameter in layer.parameters()
    }
    return parameters | {id(buffer): buffer.nbytes for buffer in layer.buffers()}


@overload
def balance_by_size(
    module: nn.Sequential,
    sample: Value,
    partitions: int = 4,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]: ...
@overload
def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    sample: Value,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]: ...
@either_order(timeout="nothing is measured; remove it, or use balance_by_time")
def balance_by_size(
    module: nn.Sequential,
    sample: Value,
    partitions: int = 4,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Layers per partition for `GPipe(module, balance, chunks=chunks)` and mini-batches like `sample`.

    Also in the order of torchgpipe 0.0.6 and later: `balance_by_size(partitions, module, sample)`, where torchgpipe
    calls the sample `input`. `param_scale` is how many bytes there are for each byte of parameters: 2 with gradients,
    up to 3 with SGD, 4 with Adam. Nothing runs, so any `device` of this machine gives the same balance.
    """
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError("some parameter already has gradient")
    require_layers(len(module), partitions)
    if device is not None:
        device_here(device)
    home = next((parameter.device for parameter in module.parameters()), tensors_of(sample)[0].device)
    micro_batch = map_tensors(lambda tensor: tensor.to(home).tensor_split(chunks)[0], sample)
    memory = memory_objective(
        module,
        Sample(micro_batch),
        PipelineSpec("gpipe", partitions, chunks, checkpoint="except_last"),
        lambda parameter: round(param_scale * parameter.nbytes),
    )
    return balance(memory, partitions).layers
