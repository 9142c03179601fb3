"""Which replica updates which parameters, and the exchange of what they updated (ZeRO-1: shard=optimizer).

Every replica has all parameters of its partitions and, after a step, all summed gradients. It has an optimizer for its
share of the parameters only, and sends these to the other replicas after the update. Each parameter is updated as
without shards, so the results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import final

import torch
from torch import Tensor, distributed, nn

from gpipe_cli.distributed.gradient_buckets import make_buckets
from gpipe_cli.distributed.rank_coords import RankCoords
from gpipe_cli.distributed.replica_shares import responsible_replicas


@final
class ParameterShards:
    def __init__(self, parameters: Sequence[nn.Parameter], coords: RankCoords) -> None:
        """parameters: those that this process trains, in the same order in every replica."""
        self._coords = coords
        replicas = responsible_replicas([parameter.nbytes for parameter in parameters], coords.replicas)
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
    pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.copy_(piece.view_as(parameter))
