"""Keys: the numbers all randomness of a step is derived from.

Decides how a step key is drawn and how (step key, layer, micro-batch) becomes a seed. How an operator is made to use
a seed is known to `torch_internals.keyed_random`.
"""

from __future__ import annotations

import hashlib
import struct

import torch

__all__ = ["draw_key", "layer_seed", "node_seed", "replica_key"]

_WORD = (1 << 64) - 1


def draw_key() -> int:
    """A step key from torch's default generator, so that `torch.manual_seed` governs it as everyone
    expects.
    """
    return int(torch.randint(1 << 62, (), device="cpu"))


def layer_seed(key: int, layer: int, micro_batch: int) -> int:
    """The seed of one layer's draws for one micro-batch: no balance, schedule or engine enters into it."""
    words = struct.pack("<QQQ", key & _WORD, layer, micro_batch)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def node_seed(key: int, layer: int, micro_batch: int, node: int) -> int:
    """The seed of what the backward of one of a layer's autograd nodes draws: no schedule enters into it."""
    # A micro-batch so far out is in no mini-batch, so no layer's seed is a node's.
    return layer_seed(layer_seed(key, layer, _WORD - micro_batch), node, 0)


def replica_key(key: int, replica: int) -> int:
    """The step key of one replica: all draw differently, the first as one that is alone."""
    # A layer so far out is in no model, so no layer's seed is a replica's key.
    return key if replica == 0 else layer_seed(key, _WORD, replica)
