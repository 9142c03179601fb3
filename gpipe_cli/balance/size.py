"""Balance by size: the partition that needs most memory needs as little as possible.

Nothing is run and nothing measured: the bytes come from fake tensors, so any device will do, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from gpipe_cli.balance.memory import LayerBytes, Memory
from gpipe_cli.balance.result import Balanced, best
from gpipe_cli.balance.solver import require_layers
from gpipe_cli.pipeline.microbatch import Value, tensors_of, value_like
from gpipe_cli.profiling.facts import model_facts
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.schedule.course import Course

PARAMETERS_AND_GRADIENTS = 2.0


def balance(memory: Memory, partitions: int) -> Balanced:
    found = best(memory, partitions, memory)
    return Balanced.of(found.balance, memory.costs, "bytes", found.largest, memory)


def memory_of(
    module: nn.Sequential, sample: Sample, course: Course, param_scale: float, limit: int | None = None
) -> Memory:
    """What partitions of the module need; `param_scale` is bytes per byte of parameters that are trained."""
    facts = model_facts(module, sample)
    inputs = [sum(one.nbytes for one in tensors_of(sample.input))]
    inputs += [facts.border(index).bytes for index in range(1, len(module))]
    layers = [
        LayerBytes(_resident(layer, param_scale), entering, saved)
        for layer, entering, saved in zip(module, inputs, facts.storages, strict=True)
    ]
    return Memory(layers, course, limit)


def _resident(layer: nn.Module, param_scale: float) -> float:
    trained = sum(one.nbytes * (param_scale if one.requires_grad else 1.0) for one in layer.parameters())
    return trained + sum(one.nbytes for one in layer.buffers())


def optimizer_scale(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> float:
    """Bytes per byte of parameters, gradients and the optimizer's state included, as a step on a small one shows."""
    probe = nn.Parameter(torch.zeros(64, 64))
    probe.grad = torch.zeros_like(probe)
    optimizer = make([probe])
    optimizer.step()
    state = [value for value in optimizer.state[probe].values() if isinstance(value, Tensor)]
    return PARAMETERS_AND_GRADIENTS + sum(one.nbytes for one in state) / probe.nbytes


def balance_by_size(
    module: nn.Sequential,
    sample: Value,
    partitions: int = 4,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Layers per partition for `GPipe(module, balance, chunks=chunks)` and mini-batches like `sample`.

    `param_scale` is how many bytes there are for each byte of parameters: 2 with gradients, up to 3 with SGD, 4 with
    Adam. Nothing runs on `device`, but the sample must be where the module is.
    """
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError("some parameter already has gradient")
    require_layers(len(module), partitions)
    place = tensors_of(sample)[0].device if device is None else torch.device(device)
    pieces = tuple(tensor.to(place).tensor_split(chunks)[0] for tensor in tensors_of(sample))
    course = Course("gpipe", partitions, chunks, checkpoint="except_last")
    memory = memory_of(module, Sample(value_like(sample, pieces)), course, param_scale)
    return balance(memory, partitions).layers
