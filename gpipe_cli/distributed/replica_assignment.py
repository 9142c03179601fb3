"""Which replica is responsible for which tensor that all replicas of a partition hold.

Whole tensors are dealt out, never parts of one: an optimizer may compute with a parameter as a whole, and the bits of
some kernels depend on where their input begins.
"""

from __future__ import annotations

from collections.abc import Sequence


def assign_replicas(sizes: Sequence[int], replicas: int) -> list[int]:
    """For each tensor the replica that is responsible for it, so that all replicas get about equally many bytes.

    sizes: in bytes, in the same order in every replica.
    """
    loads = [0] * replicas
    responsible = [0] * len(sizes)
    # The largest first, each to the replica with the least so far: no replica gets more than 4/3 of the best possible.
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        replica = loads.index(min(loads))
        responsible[index] = replica
        loads[replica] += sizes[index]
    return responsible


def largest_share(sizes: Sequence[int], state_sizes: Sequence[int], *, replicas: int) -> int:
    """The most that a replica has of what belongs to tensors of these sizes, if it has it for its own tensors only."""
    shares = [0] * replicas
    for replica, size in zip(assign_replicas(sizes, replicas), state_sizes, strict=True):
        shares[replica] += size
    return max(shares)
