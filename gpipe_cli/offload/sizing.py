"""How many slices, and where they end: by bytes or by operations, or as many as it takes to stay within a memory.

Decides what a slice needs on the device: its weights and what the optimizer keeps, once per room, its gradients, what
its layers keep for backward, and what is there all the time. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

from torch import nn

from gpipe_cli.balance.solver import solve
from gpipe_cli.errors import ConfigError
from gpipe_cli.offload.layout import ALIGNMENT, padded
from gpipe_cli.profiling.facts import ModelFacts, model_facts
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.profiling.optimizer_state import MakeOptimizer, state_bytes
from gpipe_cli.values import format_bytes

__all__ = ["Demand", "border_bytes", "layer_bytes", "optimizer_bytes"]


def layer_bytes(module: nn.Sequential) -> list[int]:
    """Of each layer's parameters; one that several have counts for the first."""
    seen: set[nn.Parameter] = set()
    found = []
    for layer in module:
        own = set(layer.parameters()) - seen
        seen |= own
        found.append(sum(padded(one.nbytes) for one in own))
    return found


@final
@dataclass(frozen=True)
class Demand:
    """What slices need on the device at once."""

    weights: Sequence[int]
    """Bytes of each layer's parameters."""
    trained: Sequence[int]
    """Bytes for each layer besides: the optimizer's."""
    facts: ModelFacts
    rooms: int
    kept_micro_batches: int
    """How many keep all of their activations between forward and backward."""

    def of(self, balance: Sequence[int]) -> int:
        borders = list(pairwise([0, *accumulate(balance)]))
        moved = max(sum(self.weights[begin:end]) + sum(self.trained[begin:end]) for begin, end in borders)
        gradients = max(sum(self.weights[begin:end]) for begin, end in borders)
        saved = max(self.facts.saved_bytes(begin, end) for begin, end in borders)
        kept = self.kept_micro_batches * self.facts.saved_bytes(0, len(self.weights))
        return self.rooms * moved + gradients + saved + kept

    def slices(self, costs: Sequence[float], limit: int) -> list[int]:
        """The fewest slices that keep within the limit."""
        balances = [solve(costs, count).balance for count in range(1, len(costs) + 1)]
        for balance in balances:
            if self.of(balance) <= limit:
                return balance
        least = min(map(self.of, balances))
        raise ConfigError(
            f"engine.memory={format_bytes(limit)}: cannot be kept, {format_bytes(least)} are needed with one layer in "
            "each slice; try more chunks, checkpoint=always or more memory"
        )


def optimizer_bytes(module: nn.Sequential, make: MakeOptimizer | None) -> list[int]:
    """Of each layer."""
    if make is None:
        return [0] * len(module)
    return [sum(state_bytes(make, layer.parameters())) for layer in module]


def border_bytes(
    module: nn.Sequential,
    balance: Sequence[int],
    recomputed: Sequence[int],
    make_sample: Callable[[], Sample],
) -> int:
    """At most of what slices are recomputed from, for so many micro-batches of each.

    0 where a layer looks at values, as nothing is known of such a model before it is run.
    """
    if not any(recomputed):
        return 0
    try:
        facts = model_facts(module, make_sample(), count_flops=False)
    except ConfigError:
        return 0
    arriving = [facts.partition_input(*part) for part in pairwise(accumulate(balance))]
    # The first one's input is the caller's.
    return sum(
        count * (one.bytes + ALIGNMENT * len(one.shapes))
        for count, one in zip(recomputed[1:], arriving, strict=True)
    )
