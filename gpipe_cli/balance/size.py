"""Balance by size: the partition that needs most memory needs as little as possible.

Nothing is run and nothing measured: the bytes come from fake tensors, so any device will do, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

from torch import nn

from gpipe_cli.accelerator.devices import Device, device_here
from gpipe_cli.balance.argument_order import either_order
from gpipe_cli.balance.memory import LayerBytes, Memory, SkipBytes
from gpipe_cli.balance.result import Balanced, best
from gpipe_cli.balance.solver import require_layers
from gpipe_cli.pipeline.microbatch import Value, tensors_of
from gpipe_cli.pipeline.pytree import map_tensors
from gpipe_cli.profiling.facts import ModelFacts, model_facts
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.schedule.pipeline_spec import PipelineSpec

TrainedBytes = Callable[[nn.Parameter], int]
"""What a parameter needs that is trained: itself, its gradient, the optimizer's state."""


def balance(memory: Memory, partitions: int) -> Balanced:
    found = best(memory, partitions, memory)
    return Balanced.of(found.balance, memory.costs, "bytes", found.largest, memory)


def memory_of(
    module: nn.Sequential, sample: Sample, spec: PipelineSpec, trained: TrainedBytes, limit: int | None = None
) -> Memory:
    """What partitions of the module need for micro-batches like the sample."""
    return memory_from(module, model_facts(module, sample, count_flops=False), spec, trained, limit)


def memory_from(
    module: nn.Sequential,
    facts: ModelFacts,
    spec: PipelineSpec,
    trained: TrainedBytes,
    limit: int | None = None,
) -> Memory:
    """The same, where the facts of such a micro-batch are known."""
    inputs = [facts.input.bytes, *(one.output_bytes for one in facts.layers[:-1])]
    resident = [_resident(layer, trained) for layer in module]
    layers = [LayerBytes(*one) for one in zip(resident, inputs, facts.storages, strict=True)]
    return Memory(layers, spec, limit, [SkipBytes(one.begin, one.end, one.bytes) for one in facts.skips])


def _resident(layer: nn.Module, trained: TrainedBytes) -> dict[int, int]:
    parameters = {id(one): trained(one) if one.requires_grad else one.nbytes for one in layer.parameters()}
    return parameters | {id(one): one.nbytes for one in layer.buffers()}


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
@either_order(timeout="nothing is measured; leave it out, or use balance_by_time")
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
    place = next((one.device for one in module.parameters()), tensors_of(sample)[0].device)
    piece = map_tensors(lambda tensor: tensor.to(place).tensor_split(chunks)[0], sample)
    memory = memory_of(
        module,
        Sample(piece),
        PipelineSpec("gpipe", partitions, chunks, checkpoint="except_last"),
        lambda parameter: round(param_scale * parameter.nbytes),
    )
    return balance(memory, partitions).layers
