"""What a partition needs on its device, in bytes, and whether a balance stays within a limit.

Parameters, their gradients and the optimizer's state are resident; each micro-batch alive under the schedule adds what
its backward needs, or only its input if it is recomputed. What a layer needs only while it runs does not count.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import final

from gpipe_cli.balance.solver import Objective, minimize, sums
from gpipe_cli.errors import ConfigError
from gpipe_cli.profiling.records import LayerMemory, SkipStats
from gpipe_cli.schedule.spec import PipelineSpec
from gpipe_cli.values import format_bytes


@final
class _SharedSums:
    """Sums over consecutive layers in which shared bytes count once."""

    def __init__(self, layers: Sequence[Mapping[int, int]]) -> None:
        self._sums = [0, *accumulate(sum(layer.values()) for layer in layers)]
        # What a layer shares with the one before it: most of what is shared is an output that the next layer saves too.
        with_previous = [0] * len(layers)
        self._others: list[tuple[int, int, int]] = []
        """What is shared across other layers: the two of them, and the bytes."""
        last: dict[int, int] = {}
        for place, layer in enumerate(layers):
            for key, size in layer.items():
                before = last.get(key)
                if before == place - 1:
                    with_previous[place] += size
                elif before is not None:
                    self._others.append((before, place, size))
                last[key] = place
        self._with_previous = [0, *accumulate(with_previous)]

    def sum(self, begin: int, end: int) -> int:
        if end <= begin:
            return 0
        twice = self._with_previous[end] - self._with_previous[begin + 1]
        twice += sum(size for before, place, size in self._others if begin <= before and place < end)
        return self._sums[end] - self._sums[begin] - twice


@final
class MemoryObjective:
    """The bytes of a partition, an objective for the solver.

    It does not grow backwards: a layer added in front may have a smaller input than the one behind it.
    """

    grows_backwards = False

    def __init__(
        self,
        layers: Sequence[LayerMemory],
        spec: PipelineSpec,
        limit: int | None = None,
        skips: Sequence[SkipStats] = (),
        frozen_layers: int = 0,
        limits: Sequence[int] = (),
    ) -> None:
        """`limit` is that of one device; partitions on the same device get equal parts of it.

        `limits` has one for each device if they differ; `limit` is then the largest.

        A partition within the first `frozen_layers` has no backward, and keeps nothing for it.
        """
        self.layers = len(layers)
        self.limit, self._limits = limit, limits
        self.costs = [sum(layer.resident.values()) + sum(layer.saved.values()) for layer in layers]
        """The bytes of each layer if one micro-batch were alive and layers shared nothing."""
        self._layers, self._spec, self._skips = layers, spec, skips
        self._frozen_layers = frozen_layers
        self._resident = _SharedSums([layer.resident for layer in layers])
        self._saved = _SharedSums([layer.saved for layer in layers])

    def cost(self, partition: int, begin: int, end: int) -> float:
        resident = self._resident.sum(begin, end)
        if end <= self._frozen_layers:
            return resident
        # Stashed before the partition and popped in it: such a skip arrives as part of the input.
        skips = sum(skip.bytes for skip in self._skips if skip.begin < begin <= skip.end < end)
        activations = self._spec.peaks[partition].bytes(
            self._saved.sum(begin, end), self._layers[begin].input + skips
        )
        return resident + activations

    def furthest(self, partition: int, begin: int, limit: float) -> int:
        reach = 1  # doubled, since sums far beyond the limit are never needed
        while begin + reach < self.layers and self.cost(partition, begin, begin + reach) <= limit:
            reach *= 2
        # The bytes never shrink as `end` grows, so the ends are sorted by them.
        ends = range(begin + 1, min(begin + reach, self.layers) + 1)
        return begin + bisect_right(ends, limit, key=lambda end: self.cost(partition, begin, end))

    @property
    def limit_per_partition(self) -> float | None:
        return None if self.limit is None else self.limit / self._spec.partitions_per_device

    def limit_of(self, partition: int) -> float | None:
        """That of one partition; devices take partitions in turn."""
        if not self._limits:
            return self.limit_per_partition
        devices = self._spec.devices or self._spec.partitions
        return self._limits[partition % devices] / self._spec.partitions_per_device

    def most(self, graphs: int, inputs: int) -> int:
        """An upper bound for any partition, if so many graphs and inputs are alive."""
        saved = self._saved.sum(0, self.layers)
        input = max(layer.input for layer in self._layers) + sum(skip.bytes for skip in self._skips)
        return self._resident.sum(0, self.layers) + graphs * saved + inputs * input

    def allows(self, partition: int, begin: int, end: int) -> bool:
        limit = self.limit_of(partition)
        return limit is None or self.cost(partition, begin, end) <= limit

    def under(self, spec: PipelineSpec) -> MemoryObjective:
        """A copy of the objective under another spec, with the sums computed so far."""
        other = copy.copy(self)
        other._spec = spec
        return other

    def fits(self, balance: Sequence[int]) -> bool:
        return self.limit_per_partition is None or max(sums(self, balance)) <= self.limit_per_partition

    def refusal(self, balance: Sequence[int] | None = None) -> ConfigError:
        """Why this balance, or any, exceeds the limit, and the smallest limit that works."""
        best = minimize(self, self._spec.partitions)
        assert best is not None and self.limit is not None, "only a limit refuses"
        enough = format_bytes(best.largest * self._spec.partitions_per_device)
        given = f"device_memory={format_bytes(self.limit)}"
        command = f"balance=manual 'balance.layers={str(best.balance).replace(' ', '')}'"
        if balance is None:
            return ConfigError(
                f"{given}: no balance of {len(best.balance)} partitions fits; the smallest limit that works is "
                f"{enough}, with {command}"
            )
        needed = format_bytes(max(sums(self, balance)) * self._spec.partitions_per_device)
        return ConfigError(
            f"{given}: balance {list(balance)} needs {needed}; the smallest limit that works is {enough}, "
            f"with {command}"
        )


@final
class WithinMemory:
    """Another objective that allows only partitions within the memory limit."""

    grows_backwards = False

    def __init__(self, objective: Objective, memory: MemoryObjective) -> None:
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
