"""What each partition will need on its device: an estimate from stats, without running anything.

Counts parameters, buffers, gradients and the optimizer's state, and the activations alive at the worst moment under the
schedule. What a layer needs only while it runs does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import final

from torch import nn

from gpipe_cli.profiling.model_stats import ModelStats
from gpipe_cli.profiling.optimizer_state import MakeOptimizer, StateBytes, state_by_parameter
from gpipe_cli.schedule.simulate import PartitionCost
from gpipe_cli.schedule.spec import PipelineSpec

KeptState = Callable[[Sequence[int], Sequence[int]], int]
"""How many bytes of an optimizer's state a process keeps, from those of each parameter and of its state."""


def whole_state(sizes: Sequence[int], state_sizes: Sequence[int]) -> int:
    return sum(state_sizes)


@final
@dataclass(frozen=True)
class PartitionMemory:
    parameter_bytes: int
    """Including buffers."""
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def activation_bytes(stats: ModelStats, balance: Sequence[int], spec: PipelineSpec) -> list[int]:
    """The most that each partition keeps for backward at once."""
    return [
        peaks.bytes(stats.saved_bytes(begin, end), stats.recompute_bytes(begin, end))
        for (begin, end), peaks in zip(_layer_ranges(balance), spec.peaks, strict=True)
    ]


def partition_memory(
    module: nn.Sequential,
    stats: ModelStats,
    balance: Sequence[int],
    spec: PipelineSpec,
    optimizer: MakeOptimizer | StateBytes,
    kept: KeptState = whole_state,
) -> list[PartitionMemory]:
    """One per partition of the balance."""
    resident = resident_memory(module, balance, optimizer, kept)
    activations = activation_bytes(stats, balance, spec)
    return [
        replace(partition, activation_bytes=bytes)
        for partition, bytes in zip(resident, activations, strict=True)
    ]


def with_bytes(
    costs: Sequence[PartitionCost],
    module: nn.Sequential,
    stats: ModelStats,
    balance: Sequence[int],
    optimizer: MakeOptimizer | StateBytes,
    kept: KeptState = whole_state,
    frozen_layers: int = 0,
) -> list[PartitionCost]:
    """The costs of the partitions with what they keep; a partition of frozen layers at the start saves nothing."""
    resident = resident_memory(module, balance, optimizer, kept)
    return [
        replace(
            cost,
            resident_bytes=memory.total_bytes,
            saved_bytes=stats.saved_bytes(begin, end) if end > frozen_layers else 0,
            input_bytes=stats.recompute_bytes(begin, end) if end > frozen_layers else 0,
        )
        for cost, memory, (begin, end) in zip(costs, resident, _layer_ranges(balance), strict=True)
    ]


def resident_memory(
    module: nn.Sequential,
    balance: Sequence[int],
    optimizer: MakeOptimizer | StateBytes | None,
    kept: KeptState = whole_state,
) -> list[PartitionMemory]:
    """The memory of each partition without activations, which needs no stats about the layers.

    optimizer: makes it, or the bytes of its state; None if there is no update.
    """
    partitions = []
    state = state_by_parameter(optimizer, module) if callable(optimizer) else optimizer
    for begin, end in _layer_ranges(balance):
        layers = list(module)[begin:end]
        # A dict counts what layers share once, and keeps the order.
        parameters = dict.fromkeys(parameter for layer in layers for parameter in layer.parameters())
        buffers = dict.fromkeys(buffer for layer in layers for buffer in layer.buffers())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        sizes = [parameter.nbytes for parameter in trained]
        partitions.append(
            PartitionMemory(
                parameter_bytes=sum(tensor.nbytes for tensor in (*parameters, *buffers)),
                gradient_bytes=sum(sizes),
                optimizer_bytes=0 if state is None else kept(sizes, [state[each] for each in trained]),
                activation_bytes=0,
            )
        )
    return partitions


def _layer_ranges(balance: Sequence[int]) -> Iterator[tuple[int, int]]:
    return pairwise([0, *accumulate(balance)])
