"""Which partition holds the others up, and what to try: rules of thumb on what was measured. Knows nothing of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from gpipe_cli.profiling.timeline import PartitionTime
from gpipe_cli.schedule import by_slice, zero_bubble
from gpipe_cli.schedule.pipeline_spec import PipelineSpec

__all__ = ["Verdict", "verdict"]

# Below these nothing is worth a word: measurements on a busy machine differ as much from one run to the next.
UNEVEN = 1.15
LARGE_BUBBLE = 0.15
ABOVE_IDEAL = 0.1
MUCH_RECOMPUTATION = 0.15


@final
@dataclass(frozen=True)
class Verdict:
    bottleneck: int
    """The partition that is busy longest."""
    advice: list[str]


def verdict(
    partitions: Sequence[PartitionTime], spec: PipelineSpec, *, bubble: float, ideal_bubble: float, rows: int
) -> Verdict:
    """`rows` is the size of a mini-batch, which bounds the number of micro-batches."""
    busiest = max(range(len(partitions)), key=lambda index: partitions[index].busy)
    advice = list(_advice(partitions, spec, bubble, ideal_bubble, rows))
    return Verdict(busiest, advice or ["nothing stands out"])


def _advice(
    partitions: Sequence[PartitionTime], spec: PipelineSpec, bubble: float, ideal_bubble: float, rows: int
) -> Iterator[str]:
    if spec.schedule == by_slice.TRAITS.name:
        yield from _of_slices(partitions, bubble)
        return
    splits, several = spec.traits.splits_backward, spec.traits.several_per_device
    busy = [one.busy for one in partitions]
    if max(busy) > UNEVEN * sum(busy) / len(busy):
        yield "balance=time divides the layers by their time"
    if ideal_bubble > LARGE_BUBBLE and 2 * spec.micro_batches <= rows:
        yield f"chunks={2 * spec.micro_batches} shortens the bubble that any schedule has at both ends"
    if ideal_bubble > LARGE_BUBBLE and not (splits or several) and len(partitions) > 1:
        yield f"schedule={zero_bubble.TRAITS.name} fills a part of it"
    if bubble > ideal_bubble + ABOVE_IDEAL:
        yield _above_ideal(spec)
    if max(one.recompute for one in partitions) > MUCH_RECOMPUTATION:
        yield "checkpoint=never saves the recomputation, if memory allows"


def _of_slices(slices: Sequence[PartitionTime], bubble: float) -> Iterator[str]:
    """One worker: what is no work is bringing in and putting away."""
    if bubble > LARGE_BUBBLE:
        yield f"a larger batch_size computes more for each load: {100 * bubble:.0f} % of the step is moving slices"
    if max(one.recompute for one in slices) * len(slices) > MUCH_RECOMPUTATION:
        yield "checkpoint=never saves the recomputation, if memory allows"


def _above_ideal(spec: PipelineSpec) -> str:
    if spec.cores is not None and spec.partitions > spec.cores:
        return f"partitions={spec.cores} is as many as there are cores: more of them take turns"
    return "fewer chunks or a larger batch_size make pieces that outweigh their handing over"
