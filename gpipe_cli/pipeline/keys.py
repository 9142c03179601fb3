"""Keys: the numbers all randomness of a step is derived from.

Decides how a step key is drawn, how (step key, layer, micro-batch) becomes a seed, and that torch's default
generators stay where they were while layers run. Knows nothing of how an op is made to use a seed
(`torch_internals.keyed_random` does that).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from gpipe_cli.errors import GpipeError

__all__ = ["DefaultGenerators", "draw_key", "layer_seed", "replica_key"]

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


def replica_key(key: int, replica: int) -> int:
    """The step key of one replica: all draw differently, the first as one that is alone."""
    # A layer so far out is in no model, so no layer's seed is a replica's key.
    return key if replica == 0 else layer_seed(key, _WORD, replica)


@final
class DefaultGenerators:
    """The states of torch's default generators, to see whether a layer drew from them behind our back.

    They are shared by all threads of the process, so such a draw would depend on timing, and recomputation
    could not repeat it.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cuda = tuple(dict.fromkeys(device for device in devices if device.type == "cuda"))
        self._states = self._read()

    def _read(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda)]

    def check_unmoved(self) -> None:
        for before, after in zip(self._states, self._read(), strict=True):
            if not torch.equal(before, after):
                raise GeneratorMoved(
                    "torch's default generator moved while the layers ran: a layer drew random numbers that "
                    "no key governs, though it drew none before, or another thread did. This step cannot "
                    "be repeated; from now on every layer runs under its key, which is right but slower"
                )


@final
class GeneratorMoved(GpipeError):
    """Random numbers were drawn outside the keys."""
