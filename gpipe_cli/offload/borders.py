"""What slices were given, kept on the tier until their backward makes it again from there.

Regions are used again once nobody can ask for what is in them. Knows nothing of slices or of their weights.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from typing import final

import torch
from torch import Tensor

from gpipe_cli.offload.layout import Layout, as_bytes
from gpipe_cli.offload.mover import Mover
from gpipe_cli.offload.tiers import Region, Tier
from gpipe_cli.pipeline.boundary import PartitionInput

__all__ = ["Borders"]


@final
class Borders:
    def __init__(self, tier: Tier, device: torch.device, mover: Mover) -> None:
        self._tier, self._device, self._mover = tier, device, mover
        self._free: dict[int, list[Region]] = {}
        """By their bytes."""

    def put_away(self, parcel: PartitionInput) -> _Deposit | None:
        """None for a parcel that stays: one that is not laid out densely might come back with other strides."""
        tensors = [one for one in parcel.tensors if one is not None]
        layout = Layout(tensors)
        if any(place.stride != one.stride() for place, one in zip(layout.places, tensors, strict=True)):
            return None
        size = min((one for one in self._free if one >= layout.nbytes and self._free[one]), default=None)
        free = self._free.setdefault(layout.nbytes if size is None else size, [])
        region = self._tier.region(layout.nbytes) if size is None else free.pop()
        jobs = [
            self._mover.put(region, place.begin, as_bytes(one))
            for place, one in zip(layout.places, tensors, strict=True)
        ]
        deposit = _Deposit(parcel, layout, region, jobs, self._device, self._mover)
        weakref.finalize(deposit, free.append, region)
        return deposit


@final
class _Deposit:
    """Gives a parcel back, as often as it is asked."""

    def __init__(
        self,
        parcel: PartitionInput,
        layout: Layout,
        region: Region,
        jobs: list[Future[None]],
        device: torch.device,
        mover: Mover,
    ) -> None:
        self._present = [one is not None for one in parcel.tensors]
        self._outline = parcel._replace(tensors=())
        self._layout, self._region, self._jobs = layout, region, jobs
        self._device, self._mover = device, mover

    def __call__(self) -> PartitionInput:
        self._mover.wait(self._jobs)
        memory = torch.empty(self._layout.nbytes, dtype=torch.uint8, device=self._device)
        # Not by the mover, where it would have to wait for the slice that is on its way.
        self._region.read(0, memory)
        self._mover.moved_bytes += len(memory)
        views = iter([place.view(memory) for place in self._layout.places])
        tensors: list[Tensor | None] = [next(views) if present else None for present in self._present]
        return self._outline._replace(tensors=tuple(tensors))
