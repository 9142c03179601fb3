"""What layers cost for one micro-batch of one size, and what partitions of them therefore do. Pure Python.

Knows nothing of where the numbers come from: measured here, or worked out for a device that is elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, final

from gpipe_cli.schedule.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.simulate import PartitionCost

__all__ = ["Costs", "Split", "Sums"]


@final
@dataclass(frozen=True)
class Split:
    """What the parts of a split backward take, as multiples of the whole."""

    input_grad: float = 0.5
    weight_grad: float = 0.5


class Sums(NamedTuple):
    """Of one micro-batch, up to each layer."""

    forward: list[float]
    backward: list[float]


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
        checkpointed: tuple[Sequence[float], Sequence[float]] | None = None,
    ) -> None:
        """`recompute` is another forward if nothing is said; `transfer` is that of each layer's output.

        `checkpointed` is the forward and backward where there is recomputation between them: it keeps less and finds
        other things in the caches. The same if nothing is said.
        """
        self.layers = len(forward)
        self.kept = Sums(_up_to(forward), _up_to(backward))
        """Of partitions that keep everything for backward."""
        self.checkpointed = self.kept if checkpointed is None else Sums(*map(_up_to, checkpointed))
        """Of partitions that recompute some micro-batches, without the recomputation."""
        self.least = self.kept
        if checkpointed is not None:
            pairs = zip((forward, backward), checkpointed, strict=True)
            self.least = Sums(*(_up_to(list(map(min, *pair))) for pair in pairs))
        self.recompute = _up_to(forward if recompute is None else recompute)
        self._transfer = [0.0] * self.layers if transfer is None else list(transfer)
        self.split = split or Split()

    def partition(self, begin: int, end: int, checkpoint_stop: int = 0) -> PartitionCost:
        sums = self.checkpointed if checkpoint_stop else self.kept
        backward = sums.backward[end] - sums.backward[begin]
        # Nobody waits for the gradient of the pipeline's input: the first partition leaves it out.
        split = self.split if begin else Split(0.0, 1.0)
        return PartitionCost(
            sums.forward[end] - sums.forward[begin],
            backward,
            recompute=self.recompute[end] - self.recompute[begin],
            transfer=self._transfer[end - 1],
            input_grad=split.input_grad * backward,
            weight_grad=split.weight_grad * backward,
        )

    def partitions(self, balance: Sequence[int], spec: PipelineSpec) -> list[PartitionCost]:
        borders = pairwise([0, *accumulate(balance)])
        return [
            self.partition(begin, end, stop)
            for (begin, end), stop in zip(borders, spec.checkpoint_stops, strict=True)
        ]


def _up_to(numbers: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(numbers)]
