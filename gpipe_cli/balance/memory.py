"""What a partition needs on its device, in bytes, and whether a balance keeps within a limit.

Parameters, their gradients and the optimizer's state are there all the time; each micro-batch that is alive under the
schedule adds what its backward needs, or its input alone where that is recomputed. What a layer needs only while it
runs is not counted. Knows nothing of torch: the numbers are given.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from gpipe_cli.balance.solver import Objective, minimise, sums
from gpipe_cli.byte_size import byte_text
from gpipe_cli.errors import ConfigError
from gpipe_cli.schedule.pipeline_spec import PipelineSpec


@final
@dataclass(frozen=True)
class LayerBytes:
    """Of one layer and one micro-batch. Mappings are by a number that tells apart what layers may share."""

    resident: Mapping[int, int]
    """There all the time: parameters with their gradients and the optimizer's state, buffers."""
    input: int
    """What enters the layer from the one before it."""
    saved: Mapping[int, int]
    """Kept for backward."""


@final
@dataclass(frozen=True)
class SkipBytes:
    """What layer `begin` hands to layer `end` past those between."""

    begin: int
    end: int
    bytes: int


@final
class _Together:
    """Sums over consecutive layers in which what is shared counts once, worked out as far as they are asked for."""

    def __init__(self, layers: Sequence[Mapping[int, int]]) -> None:
        self._layers = layers
        self._by_begin: dict[int, tuple[list[int], set[int]]] = {}

    def sum(self, begin: int, end: int) -> int:
        sums, seen = self._by_begin.setdefault(begin, ([0], set()))
        for layer in self._layers[begin + len(sums) - 1 : end]:
            new = layer.keys() - seen
            seen |= new
            sums.append(sums[-1] + sum(layer[one] for one in new))
        return sums[end - begin]


@final
class Memory:
    """The bytes of a partition, an objective for the solver.

    It does not grow backwards: a layer added in front may have a smaller input than the one behind it.
    """

    grows_backwards = False

    def __init__(
        self,
        layers: Sequence[LayerBytes],
        spec: PipelineSpec,
        limit: int | None = None,
        skips: Sequence[SkipBytes] = (),
    ) -> None:
        """`limit` is that of one device; partitions that share it get equal parts."""
        self.layers = len(layers)
        self.limit = limit
        self.costs = [sum(one.resident.values()) + sum(one.saved.values()) for one in layers]
        """A number for each layer, as if one micro-batch were alive and it shared nothing."""
        self._layers, self._spec, self._skips = layers, spec, skips
        self._resident = _Together([one.resident for one in layers])
        self._saved = _Together([one.saved for one in layers])

    def cost(self, partition: int, begin: int, end: int) -> float:
        arriving = sum(one.bytes for one in self._skips if one.begin < begin <= one.end < end)
        kept = self._spec.peaks[partition].bytes(
            self._saved.sum(begin, end), self._layers[begin].input + arriving
        )
        return self._resident.sum(begin, end) + kept

    def furthest(self, partition: int, begin: int, limit: float) -> int:
        reach = 1  # doubled, since what lies far beyond the limit is never asked for
        while begin + reach < self.layers and self.cost(partition, begin, begin + reach) <= limit:
            reach *= 2
        ends = range(begin + 1, min(begin + reach, self.layers) + 1)
        return begin + bisect_right(ends, limit, key=lambda end: self.cost(partition, begin, end))

    @property
    def limit_per_partition(self) -> float | None:
        return None if self.limit is None else self.limit / self._spec.partitions_per_device

    def most(self, graphs: int, inputs: int) -> int:
        """What no partition exceeds, however many layers it has, if so many graphs and inputs are alive."""
        saved = self._saved.sum(0, self.layers)
        input = max(one.input for one in self._layers) + sum(one.bytes for one in self._skips)
        return self._resident.sum(0, self.layers) + graphs * saved + inputs * input

    def allows(self, partition: int, begin: int, end: int) -> bool:
        limit = self.limit_per_partition
        return limit is None or self.cost(partition, begin, end) <= limit

    def under(self, spec: PipelineSpec) -> Memory:
        """The same layers and limit, on another spec; what has been added up is shared."""
        other = copy.copy(self)
        other._spec = spec
        return other

    def fits(self, balance: Sequence[int]) -> bool:
        return self.limit_per_partition is None or max(sums(self, balance)) <= self.limit_per_partition

    def refusal(self, balance: Sequence[int] | None = None) -> ConfigError:
        """Why the limit cannot be kept, by this balance or by any, with the smallest that would do."""
        best = minimise(self, self._spec.partitions)
        assert best is not None and self.limit is not None, "only a limit refuses"
        enough = byte_text(best.largest * self._spec.partitions_per_device)
        given = f"device_memory={byte_text(self.limit)}"
        paste = f"balance=manual balance.layers={str(best.balance).replace(' ', '')}"
        if balance is None:
            return ConfigError(
                f"{given}: no balance of {len(best.balance)} partitions needs so little; the smallest limit that "
                f"would do is {enough}, with {paste}"
            )
        needed = byte_text(max(sums(self, balance)) * self._spec.partitions_per_device)
        return ConfigError(
            f"{given}: balance {list(balance)} needs {needed}; the smallest limit that would do is {enough}, "
            f"with {paste}"
        )


@final
class Limited:
    """Another objective, where only partitions within the memory limit are allowed."""

    grows_backwards = False

    def __init__(self, objective: Objective, memory: Memory) -> None:
        assert memory.limit_per_partition is not None
        self.layers = objective.layers
        self._objective, self._memory, self._limit = objective, memory, memory.limit_per_partition

    def cost(self, partition: int, begin: int, end: int) -> float:
        return self._objective.cost(partition, begin, end)

    def furthest(self, partition: int, begin: int, limit: float) -> int:
        return min(
            self._objective.furthest(partition, begin, limit),
            self._memory.furthest(partition, begin, self._limit),
        )
