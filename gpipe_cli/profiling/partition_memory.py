"""What each partition will need on its device: an estimate from facts, nothing is run.

Counts what is there all the time (parameters, buffers, gradients, the optimizer's state) and the activations alive
at the worst moment under the schedule. What a layer needs only while it runs is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import final

from torch import nn

from gpipe_cli.profiling.facts import ModelFacts
from gpipe_cli.profiling.optimizer_state import MakeOptimizer, state_bytes
from gpipe_cli.schedule.pipeline_spec import PipelineSpec

__all__ = ["PartitionMemory", "activation_bytes", "partition_memory", "resident_memory"]


@final
@dataclass(frozen=True)
class PartitionMemory:
    parameter_bytes: int
    """Buffers among them."""
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def activation_bytes(facts: ModelFacts, balance: Sequence[int], spec: PipelineSpec) -> list[int]:
    """The most that each partition keeps for backward at once."""
    return [
        kept.bytes(facts.saved_bytes(begin, end), facts.partition_input(begin, end).bytes)
        for (begin, end), kept in zip(_borders(balance), spec.peaks, strict=True)
    ]


def partition_memory(
    module: nn.Sequential,
    facts: ModelFacts,
    balance: Sequence[int],
    spec: PipelineSpec,
    optimizer: MakeOptimizer,
) -> list[PartitionMemory]:
    """One per partition of the balance."""
    resident = resident_memory(module, balance, optimizer)
    activations = activation_bytes(facts, balance, spec)
    return [replace(one, activation_bytes=kept) for one, kept in zip(resident, activations, strict=True)]


def resident_memory(
    module: nn.Sequential, balance: Sequence[int], optimizer: MakeOptimizer
) -> list[PartitionMemory]:
    """The same without activations, for which a model need not be looked at closely."""
    layers = list(module)
    return [_resident(layers[begin:end], optimizer) for begin, end in _borders(balance)]


def _borders(balance: Sequence[int]) -> Iterator[tuple[int, int]]:
    return pairwise([0, *accumulate(balance)])


def _resident(layers: Sequence[nn.Module], optimizer: MakeOptimizer) -> PartitionMemory:
    # dict: what layers share is there once.
    parameters = dict.fromkeys(one for layer in layers for one in layer.parameters())
    buffers = dict.fromkeys(one for layer in layers for one in layer.buffers())
    return PartitionMemory(
        parameter_bytes=sum(one.nbytes for one in (*parameters, *buffers)),
        gradient_bytes=sum(one.nbytes for one in parameters if one.requires_grad),
        optimizer_bytes=sum(state_bytes(optimizer, parameters)),
        activation_bytes=0,
    )
