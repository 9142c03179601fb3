"""Slices taking turns on a device: brought in before a worker gets to them, put away after it.

There are two rooms on the device, and each slice is always brought to the same one: while one is worked on, the next
comes into the other, and what autograd kept of a slice's weights in forward finds them in backward at the same
address, with the same bytes. Decides what is in which room; knows nothing of how bytes are moved, or of updates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import zip_longest
from typing import Protocol, final

import torch
from torch import Tensor

from gpipe_cli.offload.borders import Borders
from gpipe_cli.offload.layout import ALIGNMENT
from gpipe_cli.offload.mover import Mover
from gpipe_cli.offload.slice import Part, Slice
from gpipe_cli.offload.tiers import Tier
from gpipe_cli.pipeline.action_loop import PartitionVisit
from gpipe_cli.pipeline.boundary import PartitionInput

__all__ = ["Completion", "Rotation"]


class Completion(Protocol):
    """What is done with a slice when its gradients are whole, while it is still there."""

    @property
    def needs(self) -> Collection[Part]:
        """What must be there besides the weights."""

    def completed(self, slice: Slice) -> Collection[Part]:
        """Gives the parts that are to be kept because they have changed."""


@final
class Rotation:
    """The Residence of one worker's partitions, which are its slices."""

    def __init__(
        self,
        slices: Mapping[int, Slice],
        tier: Tier,
        device: torch.device,
        *,
        rooms: int = 2,
        beside: bool = True,
    ) -> None:
        self.slices = slices
        self.mover = Mover(device, beside=beside)
        self._borders = Borders(tier, device, self.mover) if tier.leaves(device) else None
        self.completion: Completion | None = None
        """None: gradients stay with their parameters."""
        largest = max((_bytes(slice, Part.WEIGHTS) for slice in slices.values()), default=0)
        count = min(rooms, len(slices))
        self._rooms = [_Room(device, largest) for _ in range(count)]
        self._room_of = {index: self._rooms[turn % count] for turn, index in enumerate(slices)}

    @contextmanager
    def on_device(self, visit: PartitionVisit, following: PartitionVisit | None) -> Iterator[None]:
        ahead = None if following is None else (following.partition, self._parts(following))
        with self._brought(visit.partition, self._parts(visit), ahead) as changed:
            yield
            if visit.is_last and self.completion is not None:
                changed.update(self.completion.completed(self.slices[visit.partition]))

    def offload(self, input: PartitionInput) -> Callable[[], PartitionInput] | None:
        return None if self._borders is None else self._borders.put_away(input)

    def tour(self, parts: Sequence[Part], changed: Collection[Part]) -> Iterator[Slice]:
        """All slices, one after another, with these parts; some of them change while they are there."""
        order = list(self.slices)
        for index, following in zip_longest(order, order[1:]):
            ahead = None if following is None else (following, parts)
            with self._brought(index, parts, ahead) as to_keep:
                yield self.slices[index]
                to_keep.update(changed)

    def settle(self) -> None:
        """Wait until all is where it belongs."""
        for room in self._rooms:
            self._await(room)

    def close(self) -> None:
        self.mover.close()

    def _parts(self, visit: PartitionVisit) -> Sequence[Part]:
        extra = self.completion.needs if visit.is_last and self.completion is not None else ()
        return [Part.WEIGHTS, *extra]

    @contextmanager
    def _brought(
        self, index: int, parts: Sequence[Part], ahead: tuple[int, Sequence[Part]] | None
    ) -> Iterator[set[Part]]:
        """Inside, the parts are there. Gives a set for those that are to be kept as they are at the end."""
        slice, room = self.slices[index], self._room_of[index]
        changed: set[Part] = set()
        try:
            self._fetch(index, parts)
            self._await(room)
            for part in parts:  # weights first: a gradient has to look like them
                if part in room.parts:
                    slice.attach(part, room.memory(part))
            if ahead is not None and self._room_of[ahead[0]] is not room:
                self._fetch(*ahead)
            yield changed
            for part in changed:
                slice.gather(part, room.memory)
        except BaseException:
            self.forget()
            raise
        finally:
            slice.detach()
        self._keep(slice, room, changed)

    def _fetch(self, index: int, parts: Sequence[Part]) -> None:
        """Begin to bring in what is not there yet."""
        slice, room = self.slices[index], self._room_of[index]
        if room.slice != index:
            room.slice, room.parts = index, set()
        for part in parts:
            shelf = slice.shelf(part)
            if shelf is not None and part not in room.parts:
                room.parts.add(part)
                room.pending.append(self.mover.load(shelf.region, room.memory(part, shelf.layout.nbytes)))

    def _keep(self, slice: Slice, room: _Room, changed: Collection[Part]) -> None:
        for part in changed:
            shelf = slice.shelf(part)
            assert shelf is not None, "what has changed has been gathered"
            room.parts.add(part)
            room.pending.append(self.mover.store(shelf.region, room.memory(part, shelf.layout.nbytes)))

    def _await(self, room: _Room) -> None:
        pending, room.pending = room.pending, []
        self.mover.wait(pending)

    def forget(self) -> None:
        """Trust nothing in the rooms: after a failure, or where slices were changed on their tier."""
        for room in self._rooms:
            room.slice = None


@final
class _Room:
    """Memory on the device that one slice after another is brought to."""

    def __init__(self, device: torch.device, weight_bytes: int) -> None:
        self._device = device
        self._memory: dict[Part, Tensor] = {}
        self.slice: int | None = None
        self.parts: set[Part] = set()
        self.pending: list[Future[None]] = []
        # Never of another size later on: autograd holds views of the weights.
        self.memory(Part.WEIGHTS, weight_bytes)

    def memory(self, part: Part, nbytes: int | None = None) -> Tensor:
        """Of so many bytes, or as many as were asked for last; what was there stays if it was large enough."""
        held = self._memory.get(part)
        if held is None or (nbytes is not None and len(held) < nbytes):
            held = torch.empty(nbytes or 0, dtype=torch.uint8, device=self._device)
            assert held.data_ptr() % ALIGNMENT == 0, "torch aligns memory at least as well"
            self._memory[part] = held
        return held if nbytes is None else held[:nbytes]


def _bytes(slice: Slice, part: Part) -> int:
    shelf = slice.shelf(part)
    return 0 if shelf is None else shelf.layout.nbytes
