"""Merges what several ranks hold of one model, so that it stays equal: statistics, tied gradients, sharded updates.

The loss of a replica is weighted by its share of all samples, so the sum of the replicas' gradients
(`gradient_buckets`) is the gradient of the mean. A replica without samples, in a short last batch, adds nothing.

Floating-point buffers that a step changed, such as the statistics of batch norm, become their mean over the replicas,
weighted by samples; integer buffers, such as a count of batches, become the largest. Deferred batch norm merges the
statistics of all replicas instead, as if one replica had processed all samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from typing import final

import torch
from torch import Tensor, distributed, nn

from gpipe_cli.distributed.gradient_buckets import make_buckets
from gpipe_cli.distributed.groups import RankCoords
from gpipe_cli.distributed.replica_assignment import assign_replicas
from gpipe_cli.distributed.world import gather_numbers, sum_of_numbers
from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm, Moments
from gpipe_cli.pipeline.tied import TiedParameters, Untied, accumulate


@final
class Replicas:
    def __init__(self, coords: RankCoords) -> None:
        self._coords = coords
        self.several = coords.replicas > 1

    def totals(self, rows: int, weight: float) -> tuple[float, float]:
        """The rows of all replicas together, and the weights that their loss gives them."""
        if not self.several:
            return rows, weight
        rows, weight = sum_of_numbers(
            torch.tensor([rows, weight], dtype=torch.float64), self._coords.data
        ).tolist()
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
        flags = sum_of_numbers(changed, self._coords.data).tolist()
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
    # Every replica merges all of them in the same order instead of reducing, so the results are bitwise identical.
    merged: Moments | None = None
    for numbers in of_replicas:
        count = int(numbers[0])
        if count:
            mean, deviation = numbers[1:].to(batch_norm.running_mean.device, precise).chunk(2)
            moments = Moments(count, mean, deviation)
            merged = moments if merged is None else merged.merge(moments)
    return merged


@final
class TiedGradients:
    """Sums the gradients of parameters that layers in several processes share.

    Each process that uses such a parameter has a copy of it, and the copies must stay bitwise identical. So the
    process of the first use sums the gradients of all uses in the order of the layers, as a single process would, and
    sends the sum to the others.
    """

    def __init__(self, tied: TiedParameters, ranks: Sequence[int], coords: RankCoords) -> None:
        """ranks: for each layer, the rank of its partition."""
        self._coords = coords
        self._ranks = ranks
        self._shared = [(parameter, users) for parameter, users in tied.users if parameter.requires_grad]
        self._between_ranks = any(len({ranks[user] for user in users}) > 1 for _, users in self._shared)
        self.borrowed = [
            parameter
            for parameter, (owner, *others) in self._shared
            if ranks[owner] != coords.rank and coords.rank in {ranks[user] for user in others}
        ]
        """Copies in this process whose owner is another process."""

    def collect(self, untied: Sequence[Untied]) -> None:
        """At its owner, give each shared parameter the sum of the gradients of all its uses."""
        gradients = [
            [of_layer.take_gradient(parameter) for of_layer in (untied[user] for user in users)]
            for parameter, users in self._shared
        ]
        # All ranks agree first on which gradients exist: a receive of one that does not would never end. Then all walk
        # the same list in the same order, so that each blocking send meets its receive.
        present = self._present(gradients)
        for (parameter, users), of_uses, has_gradient in zip(self._shared, gradients, present, strict=True):
            total: Tensor | None = None
            for user, gradient, is_present in zip(users, of_uses, has_gradient, strict=True):
                if is_present:
                    total = self._added_at_owner(total, parameter, users, user, gradient)
            if total is not None:
                accumulate(parameter, total)

    def spread(self) -> None:
        """Send each sum to the other processes that use the parameter."""
        if not self._between_ranks:
            return
        has_gradient = self._present([[parameter.grad] for parameter, _ in self._shared])
        for (parameter, users), (present,) in zip(self._shared, has_gradient, strict=True):
            if not present:
                continue
            owner = self._ranks[users[0]]
            for rank in sorted({self._ranks[user] for user in users} - {owner}):
                if self._coords.rank == owner:
                    assert parameter.grad is not None, "this rank reported that it has one"
                    distributed.send(parameter.grad, group=self._coords.pipe, group_dst=rank)
                elif self._coords.rank == rank:
                    parameter.grad = self._received(parameter, owner)

    def _added_at_owner(
        self,
        total: Tensor | None,
        parameter: nn.Parameter,
        users: Sequence[int],
        user: int,
        gradient: Tensor | None,
    ) -> Tensor | None:
        """At the owner, `total` plus the gradient of one use in whichever process; elsewhere None."""
        rank, owner = self._ranks[user], self._ranks[users[0]]
        if self._coords.rank == owner:
            addend = self._received(parameter, rank) if rank != owner else gradient
            assert addend is not None, "the ranks agreed that this use has a gradient"
            # In the order of the layers, whichever process they are in: that order decides the bits.
            return addend if total is None else total + addend
        if self._coords.rank == rank:
            assert gradient is not None, "the ranks agreed that this use has a gradient"
            distributed.send(gradient.contiguous(), group=self._coords.pipe, group_dst=owner)
        return None

    def _received(self, parameter: nn.Parameter, source: int) -> Tensor:
        # Sent as contiguous memory, so it must be received as such, whatever strides the parameter has.
        buffer = torch.empty_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
        distributed.recv(buffer, group=self._coords.pipe, group_src=source)
        return buffer

    def _present(self, gradients: Sequence[Sequence[Tensor | None]]) -> list[list[bool]]:
        """Which uses have a gradient, in whichever process: the loss may not depend on a use."""
        flags = [[gradient is not None for gradient in of_uses] for of_uses in gradients]
        if not self._between_ranks:
            return flags
        flat = torch.tensor([flag for of_uses in flags for flag in of_uses])
        values = iter(sum_of_numbers(flat, self._coords.pipe).tolist())
        return [[bool(next(values)) for _ in of_uses] for of_uses in flags]


@final
class ParameterShards:
    """Which replica updates which parameters, and the exchange of what they updated (ZeRO-1: shard=optimizer).

    Every replica has all parameters of its partitions and, after a step, all summed gradients. It has an optimizer for
    its share of the parameters only, and sends these to the other replicas after the update. Each parameter is updated
    as without shards, so the results are bitwise identical.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], coords: RankCoords) -> None:
        """parameters: those that this process trains, in the same order in every replica."""
        self._coords = coords
        replicas = assign_replicas([parameter.nbytes for parameter in parameters], coords.replicas)
        by_replica = [
            [parameter for parameter, replica in zip(parameters, replicas, strict=True) if replica == owner]
            for owner in range(coords.replicas)
        ]
        self.own = by_replica[coords.replica]
        """The parameters that this replica updates, in the order given."""
        self.others = [
            parameter
            for replica, own in enumerate(by_replica)
            if replica != coords.replica
            for parameter in own
        ]
        self._rounds = list(zip_longest(*map(make_buckets, by_replica)))

    @torch.no_grad()
    def exchange(self) -> None:
        """Give every replica the parameters of their owners; all replicas call it together."""
        # A bucket of each owner at a time: all replicas send at once, and the copies stay small.
        for buckets in self._rounds:
            sent = [
                (owner, bucket.parameters, self._flat(owner, bucket.parameters))
                for owner, bucket in enumerate(buckets)
                if bucket is not None
            ]
            works = [
                distributed.broadcast(flat, group=self._coords.data, group_src=owner, async_op=True)
                for owner, _, flat in sent
            ]
            for work, (owner, parameters, flat) in zip(works, sent, strict=True):
                assert work is not None, "this process is a member of the group"
                work.wait()
                if owner != self._coords.replica:
                    _unpack(flat, parameters)

    def _flat(self, owner: int, parameters: Sequence[Tensor]) -> Tensor:
        """What is sent or received for a bucket: a large parameter itself, small ones in one tensor."""
        if len(parameters) == 1 and parameters[0].is_contiguous():
            return parameters[0].detach().view(-1)
        if owner == self._coords.replica:
            return torch.cat([parameter.detach().flatten() for parameter in parameters])
        return parameters[0].new_empty(sum(parameter.numel() for parameter in parameters))


def _unpack(flat: Tensor, parameters: Sequence[Tensor]) -> None:
    if len(parameters) == 1 and parameters[0].is_contiguous():  # it has been received in place
        return
    for parameter, piece in zip(parameters, _cut(flat, parameters), strict=True):
        parameter.copy_(piece)
