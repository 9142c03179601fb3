"""Seeds made of what they are for, such as (seed, "order", epoch), so that none has to be saved.

The same parts give the same seed in every process, run and version; Python's own hash() would not.
"""

from __future__ import annotations

from hashlib import blake2b

import torch


def derived_seed(*parts: int | str) -> int:
    """A number below 2**63 that no other parts share but by chance."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derived_seed(*parts))
