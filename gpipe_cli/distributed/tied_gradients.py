"""Sums the gradients of parameters that layers in several processes share.

Each process that uses such a parameter has a copy of it, and the copies must stay equal to the bit. So the process of
the first use sums the gradients of all uses in the order of the layers, as a single process would, and sends the sum
to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, distributed, nn

from gpipe_cli.distributed.messages import sum_of_numbers
from gpipe_cli.distributed.rank_coords import RankCoords
from gpipe_cli.pipeline.tied import TiedParameters, Untied, accumulate


@final
class TiedGradients:
    def __init__(self, tied: TiedParameters, ranks: Sequence[int], coords: RankCoords) -> None:
        """ranks: for each layer, the rank of its partition."""
        self._coords = coords
        self._ranks = ranks
        self._shared = [(parameter, users) for parameter, users in tied.users if parameter.requires_grad]
        self._between_ranks = any(len({ranks[user] for user in users}) > 1 for _, users in self._shared)
        self.borrowed = [
            parameter for parameter, users in self._shared if self._uses(users) and not self._owns(users)
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
                    assert parameter.grad is not None, "it has just said so"
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

    def _uses(self, users: Sequence[int]) -> bool:
        return any(self._ranks[user] == self._coords.rank for user in users)

    def _owns(self, users: Sequence[int]) -> bool:
        return self._ranks[users[0]] == self._coords.rank
