"""Which layers a partition may have, and what it must recompute to keep within its memory. Pure Python.

Knows nothing of time. Recomputing more never makes a step shorter, so a partition is given the least that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import final

from gpipe_cli.balance.memory import Memory
from gpipe_cli.schedule.checkpoint import Checkpoint, settled

__all__ = ["Fit"]


@final
class Fit:
    def __init__(self, memories: Mapping[str, Memory | None]) -> None:
        """The modes to choose from, from the least recomputation on, each with its memory; None: all fits."""
        self._memories = memories

    @property
    def modes(self) -> Sequence[str]:
        return tuple(self._memories)

    @property
    def only(self) -> str | None:
        """The mode of all partitions, where any layers fit; None where that must be asked."""
        (mode, memory), *others = self._memories.items()
        return mode if memory is None or (not others and memory.limit is None) else None

    def mode(self, partition: int, begin: int, end: int) -> str | None:
        """Of the partition that has the layers from `begin` up to `end`; None where they do not fit.

        With every layer added at the end it recomputes as much or more.
        """
        for mode, memory in self._memories.items():
            if memory is None or memory.allows(partition, begin, end):
                return mode
        return None

    def checkpoint(self, balance: Sequence[int]) -> Checkpoint | None:
        """Of all partitions of a balance; None where it does not fit."""
        modes = []
        for partition, (begin, end) in enumerate(pairwise([0, *accumulate(balance)])):
            mode = self.mode(partition, begin, end)
            if mode is None:
                return None
            modes.append(mode)
        return settled(modes, len(modes))
