"""What replicas of a model tell each other, so that they stay equal: gradients, and what batch norm has seen.

After the last backward of a step all gradients of a process go, end to end in one tensor, through one sum over the
replicas. (torch's DistributedDataParallel reduces nothing under a split backward, and waits for ever where replicas
have unequally many micro-batches.) Each replica's loss counts by its share of all samples, so the sum is the gradient
of the mean. A replica without samples, in a short last batch, adds nothing.

Buffers that a step changed, such as the statistics of batch norm, become their mean over the replicas, weighted by
samples; whole numbers, such as a count of batches, the largest. Deferred batch norm merges what all replicas have seen
instead, as if one had seen it all. Knows nothing of partitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import final

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from gpipe_cli.distributed.messages import gather_numbers, sum_of_numbers
from gpipe_cli.distributed.rank_coords import RankCoords
from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm, Moments
from gpipe_cli.pipeline.module_state import SavedBuffer

__all__ = ["Replicas", "summed_gradients"]


@final
class Replicas:
    def __init__(self, coords: RankCoords) -> None:
        self._coords = coords
        self.several = coords.replicas > 1

    def total(self, rows: int) -> int:
        """The rows of all replicas together."""
        if not self.several:
            return rows
        return int(self._sum(torch.tensor([rows])))

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace each gradient by the sum over all replicas; those that no replica has stay None."""
        if self.several:
            for parameter, gradient in summed_gradients(parameters, self._coords.data, self._coords.device):
                parameter.grad = gradient

    @torch.no_grad()
    def merge_buffers(self, before: Sequence[SavedBuffer], share: float) -> None:
        """Make equal what a step has changed; `share`: this replica's part of all samples."""
        if not before:
            return
        changed = torch.tensor([not torch.equal(one.buffer.get(), one.value) for one in before])
        # What any replica changed is merged by all: one without samples changed nothing, but must join the same
        # collectives.
        flags = self._sum(changed).tolist()
        buffers = [one.buffer.get() for one, flag in zip(before, flags, strict=True) if flag]
        for group in _by_dtype(buffers):
            flat = torch.cat([one.flatten() for one in group])
            if flat.is_floating_point():
                distributed.all_reduce(flat.mul_(share), group=self._coords.data)
            else:
                distributed.all_reduce(flat, distributed.ReduceOp.MAX, group=self._coords.data)
            for buffer, one in zip(group, _cut(flat, group), strict=True):
                buffer.copy_(one)

    def merge_moments(self, batch_norms: Sequence[DeferredBatchNorm]) -> None:
        """Let each deferred batch norm have seen what those of all replicas have, in the order of replicas."""
        if not self.several or not batch_norms:
            return
        own = torch.cat([_numbers(one) for one in batch_norms])
        rows = gather_numbers(own, self._coords.data, self._coords.device)
        sizes = [1 + 2 * one.num_features for one in batch_norms]
        for batch_norm, *of_replicas in zip(
            batch_norms, *(torch.split(row, sizes) for row in rows), strict=True
        ):
            batch_norm.pending = _merged(batch_norm, of_replicas)

    def _sum(self, numbers: Tensor) -> Tensor:
        return sum_of_numbers(numbers, self._coords.data, self._coords.device)


def summed_gradients(
    parameters: Sequence[Tensor], group: ProcessGroup, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter that has a gradient in some process of the group, with the sum over all of them."""
    present = sum_of_numbers(
        torch.tensor([parameter.grad is not None for parameter in parameters]), group, device
    )
    # Replicas may have gradients of different parameters, but must reduce tensors of one length: zeros fill the gaps.
    wanted = [parameter for parameter, there in zip(parameters, present.tolist(), strict=True) if there]
    for alike in _by_dtype(wanted):
        flat = torch.cat([_gradient(parameter).flatten() for parameter in alike])
        distributed.all_reduce(flat, group=group)
        yield from zip(alike, _cut(flat, alike), strict=True)


def _by_dtype(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    # The sort is stable, so every rank lays the tensors end to end in the same order.
    for _, group in groupby(sorted(tensors, key=lambda one: str(one.dtype)), key=lambda one: one.dtype):
        yield list(group)


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What was laid end to end, as it was before."""
    pieces = torch.split(flat, [one.numel() for one in like])
    return [piece.view_as(one) for piece, one in zip(pieces, like, strict=True)]


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _numbers(batch_norm: DeferredBatchNorm) -> Tensor:
    """A count, means and squared deviations; a count of 0 where nothing was seen."""
    seen = batch_norm.pending
    if seen is None:
        return torch.zeros(1 + 2 * batch_norm.num_features, dtype=torch.float64)
    count = torch.tensor([seen.count], dtype=torch.float64)
    return torch.cat([count, seen.mean.cpu().double(), seen.deviation.cpu().double()])


def _merged(batch_norm: DeferredBatchNorm, of_replicas: Sequence[Tensor]) -> Moments | None:
    precise = torch.promote_types(batch_norm.running_mean.dtype, torch.float32)
    # Every replica merges all of them in the same order instead of reducing, so the results are equal to the bit.
    merged: Moments | None = None
    for numbers in of_replicas:
        count = int(numbers[0])
        if count:
            mean, deviation = numbers[1:].to(batch_norm.running_mean.device, precise).chunk(2)
            seen = Moments(count, mean, deviation)
            merged = seen if merged is None else merged.merge(seen)
    return merged
