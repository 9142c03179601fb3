"""What layers, and partitions of them, cost for one micro-batch of one size: measured or estimated. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, final

from gpipe_cli.schedule.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.simulate import PartitionCost


@final
@dataclass(frozen=True)
class BackwardSplit:
    """The duration of the parts of a split backward, as multiples of the whole."""

    input_grad: float = 0.5
    weight_grad: float = 0.5


class PrefixSums(NamedTuple):
    """Of the costs of one micro-batch, up to each layer."""

    forward: list[float]
    backward: list[float]


@final
class LayerCosts:
    """Milliseconds."""

    def __init__(
        self,
        forward: Sequence[float],
        backward: Sequence[float],
        recompute: Sequence[float] | None = None,
        transfer: Sequence[float] | None = None,
        split: BackwardSplit | None = None,
        checkpointed: tuple[Sequence[float], Sequence[float]] | None = None,
        frozen_layers: int = 0,
    ) -> None:
        """One number per layer each. `recompute` defaults to another forward; `transfer` is that of the layer's output.

        `checkpointed` is forward and backward with a recomputation between them, by default the same as without: such
        a forward saves less, and the caches hold other data. A partition within the first `frozen_layers` has no
        backward, so it recomputes nothing.
        """
        self.layers = len(forward)
        self.without_recompute = PrefixSums(_up_to(forward), _up_to(backward))
        """Of partitions that recompute nothing."""
        self.checkpointed = (
            self.without_recompute if checkpointed is None else PrefixSums(*map(_up_to, checkpointed))
        )
        """Of partitions that recompute some micro-batches, without the recomputation."""
        self.least = self.without_recompute
        if checkpointed is not None:
            pairs = zip((forward, backward), checkpointed, strict=True)
            self.least = PrefixSums(*(_up_to(list(map(min, *pair))) for pair in pairs))
        self.frozen_layers = frozen_layers
        self._recompute = _up_to(forward if recompute is None else recompute)
        self._transfer = [0.0] * self.layers if transfer is None else list(transfer)
        self.split = split or BackwardSplit()

    def recompute(self, begin: int, end: int) -> float:
        """Of a partition, for one micro-batch."""
        return self._recompute[end] - self._recompute[begin] if end > self.frozen_layers else 0.0

    def partition(self, begin: int, end: int, checkpoint_stop: int = 0) -> PartitionCost:
        sums = self.checkpointed if checkpoint_stop else self.without_recompute
        backward = sums.backward[end] - sums.backward[begin]
        # Nothing before the first trained layer waits for a gradient, so its partition leaves that of its input out.
        split = self.split if begin > self.frozen_layers else BackwardSplit(0.0, 1.0)
        return PartitionCost(
            sums.forward[end] - sums.forward[begin],
            backward,
            recompute=self.recompute(begin, end),
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
