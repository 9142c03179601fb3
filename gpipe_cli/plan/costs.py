"""What layers cost for one micro-batch of one size, and what partitions of them therefore do. Pure Python.

Knows nothing of where the numbers come from: measured here, or worked out for a device that is elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

from gpipe_cli.schedule.simulate import PartitionCost

__all__ = ["Costs", "Split"]


@final
@dataclass(frozen=True)
class Split:
    """What the parts of a split backward take, as multiples of the whole."""

    input_grad: float = 0.5
    weight_grad: float = 0.5


@final
class Costs:
    """Milliseconds; every list has one number per layer."""

    def __init__(
        self,
        forward: Sequence[float],
        backward: Sequence[float],
        recompute: Sequence[float] | None = None,
        transfer: Sequence[float] | None = None,
        split: Split | None = None,
    ) -> None:
        """`recompute` is another forward if nothing is said; `transfer` is that of each layer's output."""
        self.layers = len(forward)
        self.forward = [0.0, *accumulate(forward)]
        """Sums up to each layer, and so are the others."""
        self.backward = [0.0, *accumulate(backward)]
        self.recompute = [0.0, *accumulate(forward if recompute is None else recompute)]
        self._transfer = [0.0] * self.layers if transfer is None else list(transfer)
        self.split = split or Split()

    def partition(self, begin: int, end: int) -> PartitionCost:
        backward = self.backward[end] - self.backward[begin]
        # Nobody waits for the gradient of the pipeline's input: the first partition leaves it out.
        split = self.split if begin else Split(0.0, 1.0)
        return PartitionCost(
            self.forward[end] - self.forward[begin],
            backward,
            recompute=self.recompute[end] - self.recompute[begin],
            transfer=self._transfer[end - 1],
            input_grad=split.input_grad * backward,
            weight_grad=split.weight_grad * backward,
        )

    def partitions(self, balance: Sequence[int]) -> list[PartitionCost]:
        return [self.partition(begin, end) for begin, end in pairwise([0, *accumulate(balance)])]
