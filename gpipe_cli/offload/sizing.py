"""How much memory slices need on a device, and the fewest slices that fit; nothing is run.

A slice needs its weights and optimizer state once per buffer, its gradients, the activations that its layers save for
backward, and those of micro-batches that are not recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

from torch import nn

from gpipe_cli.balance.solver import solve
from gpipe_cli.errors import ConfigError
from gpipe_cli.offload.stored_tensors import ALIGNMENT, padded
from gpipe_cli.profiling.facts import ModelFacts, model_facts
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.profiling.optimizer_state import MakeOptimizer, state_bytes
from gpipe_cli.values import format_bytes


def layer_bytes(module: nn.Sequential) -> list[int]:
    """The bytes of each layer's parameters; a shared parameter counts for its first layer."""
    counted: set[nn.Parameter] = set()
    sizes = []
    for layer in module:
        own = set(layer.parameters()) - counted
        counted |= own
        sizes.append(sum(padded(parameter.nbytes) for parameter in own))
    return sizes


@final
@dataclass(frozen=True)
class DeviceDemand:
    """The bytes that slices need on the device at the same time."""

    weights: Sequence[int]
    """Bytes of each layer's parameters."""
    trained: Sequence[int]
    """Bytes that training adds to each layer: optimizer state, and gradients that are stored."""
    facts: ModelFacts
    buffers: int
    saved_micro_batches: int
    """How many are not recomputed, and so save all their activations between forward and backward."""

    def of(self, balance: Sequence[int]) -> int:
        ranges = list(pairwise([0, *accumulate(balance)]))
        moved = max(sum(self.weights[begin:end]) + sum(self.trained[begin:end]) for begin, end in ranges)
        gradients = max(sum(self.weights[begin:end]) for begin, end in ranges)
        saved = max(self.facts.saved_bytes(begin, end) for begin, end in ranges)
        always_saved = self.saved_micro_batches * self.facts.saved_bytes(0, len(self.weights))
        return self.buffers * moved + gradients + saved + always_saved

    def slices(self, costs: Sequence[float], limit: int) -> list[int]:
        """The balance with the fewest slices that stay within the limit."""
        balances = [solve(costs, count).balance for count in range(1, len(costs) + 1)]
        # Not a bisection: balances even out costs, not bytes, so more slices do not always need less memory.
        for balance in balances:
            if self.of(balance) <= limit:
                return balance
        least = min(map(self.of, balances))
        raise ConfigError(
            f"engine.memory={format_bytes(limit)}: is too little, {format_bytes(least)} are needed with one layer in "
            "each slice; try more chunks, checkpoint=always or more memory"
        )


def optimizer_bytes(module: nn.Sequential, make: MakeOptimizer | None) -> list[int]:
    """Per layer."""
    if make is None:
        return [0] * len(module)
    return [sum(state_bytes(make, layer.parameters())) for layer in module]


def boundary_bytes(
    module: nn.Sequential,
    balance: Sequence[int],
    recomputed: Sequence[int],
    make_sample: Callable[[], Sample],
) -> int:
    """An upper bound for the inputs from which slices are recomputed; recomputed: micro-batches of each slice.

    0 if a layer's shapes depend on values: nothing is known of such a model before it runs.
    """
    if not any(recomputed):
        return 0
    try:
        facts = model_facts(module, make_sample(), count_flops=False)
    except ConfigError:
        return 0
    arriving = [facts.partition_input(*part) for part in pairwise(accumulate(balance))]
    # The input of the first slice is the caller's, and stays.
    return sum(
        count * (boundary.bytes + ALIGNMENT * len(boundary.shapes))
        for count, boundary in zip(recomputed[1:], arriving, strict=True)
    )
