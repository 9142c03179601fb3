"""Merges what replicas of a model changed besides gradients, so that they stay equal: batch-norm statistics.

The loss of a replica is weighted by its share of all samples, so the sum of the replicas' gradients
(`gradient_buckets`) is the gradient of the mean. A replica without samples, in a short last batch, adds nothing.

Floating-point buffers that a step changed, such as the statistics of batch norm, become their mean over the replicas,
weighted by samples; integer buffers, such as a count of batches, become the largest. Deferred batch norm merges the
statistics of all replicas instead, as if one replica had processed all samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import final

import torch
from torch import Tensor, distributed

from gpipe_cli.distributed.messages import gather_numbers, sum_of_numbers
from gpipe_cli.distributed.rank_coords import RankCoords
from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm, Moments


@final
class Replicas:
    def __init__(self, coords: RankCoords) -> None:
        self._coords = coords
        self.several = coords.replicas > 1

    def totals(self, rows: int, weight: float) -> tuple[float, float]:
        """The rows of all replicas together, and the weights that their loss gives them."""
        if not self.several:
            return rows, weight
        rows, weight = self._sum(torch.tensor([rows, weight], dtype=torch.float64)).tolist()
        return rows, weight

    @torch.no_grad()
    def merge_buffers(self, buffers: Sequence[tuple[Tensor, Tensor]], share: float) -> None:
        """Merge the buffers that a step changed, given with their values before it.

        share: this replica's fraction of all samples.
        """
        if not buffers:
            return
        # Compared on the device and read at once: torch.equal would make the host wait for every buffer.
        changed = torch.stack([(now != before).any() for now, before in buffers])
        # What any replica changed is merged by all: one without samples changed nothing, but must join the same
        # collectives.
        flags = self._sum(changed).tolist()
        merged = [now for (now, _), flag in zip(buffers, flags, strict=True) if flag]
        for group in _by_dtype(merged):
            flat = torch.cat([tensor.flatten() for tensor in group])
            if flat.is_floating_point():
                distributed.all_reduce(flat.mul_(share), group=self._coords.data)
            else:
                distributed.all_reduce(flat, distributed.ReduceOp.MAX, group=self._coords.data)
            for buffer, tensor in zip(group, _cut(flat, group), strict=True):
                buffer.copy_(tensor)

    def merge_moments(self, batch_norms: Sequence[DeferredBatchNorm]) -> None:
        """Merge the moments of each deferred batch norm over all replicas, in the order of replicas."""
        if not self.several or not batch_norms:
            return
        own = torch.cat([_numbers(batch_norm) for batch_norm in batch_norms])
        rows = gather_numbers(own, self._coords.data)
        sizes = [1 + 2 * batch_norm.num_features for batch_norm in batch_norms]
        for batch_norm, *of_replicas in zip(
            batch_norms, *(torch.split(row, sizes) for row in rows), strict=True
        ):
            batch_norm.pending = _merged(batch_norm, of_replicas)

    def _sum(self, numbers: Tensor) -> Tensor:
        return sum_of_numbers(numbers, self._coords.data)


def _by_dtype(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    # The sort is stable, so every rank lays the tensors end to end in the same order.
    for _, group in groupby(
        sorted(tensors, key=lambda tensor: str(tensor.dtype)), key=lambda tensor: tensor.dtype
    ):
        yield list(group)


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a concatenated tensor into the original shapes."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]


def _numbers(batch_norm: DeferredBatchNorm) -> Tensor:
    """A count, means and squared deviations; the count is 0 for a replica without samples."""
    moments = batch_norm.pending
    if moments is None:
        return torch.zeros(1 + 2 * batch_norm.num_features, dtype=torch.float64)
    count = torch.tensor([moments.count], dtype=torch.float64)
    return torch.cat([count, moments.mean.cpu().double(), moments.deviation.cpu().double()])


def _merged(batch_norm: DeferredBatchNorm, of_replicas: Sequence[Tensor]) -> Moments | None:
    precise = torch.promote_types(batch_norm.running_mean.dtype, torch.float32)
    # Every replica merges all of them in the same order instead of reducing, so the results are equal to the bit.
    merged: Moments | None = None
    for numbers in of_replicas:
        count = int(numbers[0])
        if count:
            mean, deviation = numbers[1:].to(batch_norm.running_mean.device, precise).chunk(2)
            moments = Moments(count, mean, deviation)
            merged = moments if merged is None else merged.merge(moments)
    return merged
