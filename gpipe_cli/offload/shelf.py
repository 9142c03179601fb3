"""Tensors that are kept on a tier together: a layout and a region for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from gpipe_cli.offload.layout import Layout, as_bytes
from gpipe_cli.offload.tiers import Tier
from gpipe_cli.torch_internals.storage import storage_of

__all__ = ["Shelf"]


@final
class Shelf:
    """Room on a tier for tensors like those given; their values come later."""

    def __init__(self, tier: Tier, tensors: Sequence[Tensor]) -> None:
        self.layout = Layout(tensors)
        self.region = tier.region(self.layout.nbytes)
        memory = self.region.memory
        self.homes = [
            place.placeholder() if memory is None else place.view(memory) for place in self.layout.places
        ]
        """What stands for each tensor while it is away: itself in the host's memory, else a hollow one."""
        self._places = (
            {}
            if memory is not None
            else dict(zip(map(storage_of, self.homes), self.layout.places, strict=True))
        )

    def put(self, index: int, value: Tensor) -> None:
        """Keep a value, wherever it is now."""
        place = self.layout.places[index]
        dense = value if value.stride() == place.stride else value.contiguous()
        self.region.write(place.begin, as_bytes(dense.detach()))

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors where their bytes have been brought to."""
        return [place.view(memory) for place in self.layout.places]

    def get(self, home: Tensor) -> Tensor | None:
        """What a hollow tensor of this shelf stands for, read; None for any other tensor."""
        place = self._places.get(storage_of(home))
        if place is None:
            return None
        value = torch.empty(place.nbytes, dtype=torch.uint8)
        self.region.read(place.begin, value)
        return value.view(place.dtype).as_strided(place.size, place.stride)
