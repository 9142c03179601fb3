"""Bring slices to a device before a worker needs them, and store them again after it.

There are two buffers on the device, and each slice always uses the same one: while a worker uses one slice, the next is
loaded into the other buffer. Autograd saves views of a slice's weights in forward, so backward must find the same bytes
at the same address.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Protocol, final

import torch
from torch import Tensor

from gpipe_cli.accelerator.streams import keep_alive
from gpipe_cli.offload.slices import ALL_WEIGHTS, Part, Slice
from gpipe_cli.offload.tiers import Layout, Region, Tier, as_bytes
from gpipe_cli.offload.transfers import Copy, TransferWorker
from gpipe_cli.pipeline.action_loop import PartitionVisit
from gpipe_cli.pipeline.boundary import PartitionInput
from gpipe_cli.torch_internals.tensors import ALIGNMENT


class SliceCompletion(Protocol):
    """What is done with a slice when its gradients are complete, while it is still on the device."""

    @property
    def needs(self) -> Collection[Part]:
        """The parts to load in addition to the weights."""

    def completed(self, slice: Slice) -> Collection[Part]:
        """Return the parts that have changed and must be stored."""


@final
class SlicePrefetcher:
    """The `PartitionStore` of one worker, whose partitions are slices."""

    def __init__(
        self,
        slices: Mapping[int, Slice],
        tier: Tier,
        device: torch.device,
        *,
        buffers: int = 2,
        in_background: bool = True,
    ) -> None:
        self.slices = slices
        self.worker = TransferWorker(device, in_background=in_background)
        self._inputs = InputStore(tier, device, self.worker) if tier.frees_memory_of(device) else None
        self.completion: SliceCompletion | None = None
        """None: gradients stay with their parameters."""
        largest = {part: _largest(part, slices.values()) for part in ALL_WEIGHTS}
        count = min(buffers, len(slices))
        self._buffers = [DeviceBuffer(device, self.worker, largest) for _ in range(count)]
        # Neighbours get different buffers, whichever way the worker walks, so one can load while the other computes.
        self._buffer_of = {index: self._buffers[turn % count] for turn, index in enumerate(slices)}

    @contextmanager
    def on_device(self, visit: PartitionVisit, following: PartitionVisit | None) -> Iterator[None]:
        prefetch = None if following is None else (following.partition, self._parts(following))
        with self._loaded(visit.partition, self._parts(visit), prefetch) as changed:
            yield
            if visit.completes_gradients and self.completion is not None:
                changed.update(self.completion.completed(self.slices[visit.partition]))

    def offload(self, input: PartitionInput) -> Callable[[], PartitionInput] | None:
        return None if self._inputs is None else self._inputs.store(input)

    def iter_loaded(self, parts: Sequence[Part], changed: Collection[Part]) -> Iterator[Slice]:
        """Yield the slices that have any of these parts, with the parts loaded; the caller changes some of them."""
        order = [index for index, slice in self.slices.items() if any(map(slice.stored, parts))]
        for index, following in zip_longest(order, order[1:]):
            prefetch = None if following is None else (following, parts)
            with self._loaded(index, parts, prefetch) as to_store:
                yield self.slices[index]
                to_store.update(changed)

    def wait_until_stored(self) -> None:
        """Wait until the tier holds what was stored, for the host to read or write it."""
        for buffer in self._buffers:
            buffer.finish_copies()

    def close(self) -> None:
        if self._inputs is not None:
            self._inputs.close()
        self.worker.close()

    def invalidate(self) -> None:
        """Load every slice again: after a failure, or when slices were changed on their tier."""
        for buffer in self._buffers:
            buffer.slice = None

    def _parts(self, visit: PartitionVisit) -> Sequence[Part]:
        extra = self.completion.needs if visit.completes_gradients and self.completion is not None else ()
        return [*ALL_WEIGHTS, *extra]

    @contextmanager
    def _loaded(
        self, index: int, parts: Sequence[Part], prefetch: tuple[int, Sequence[Part]] | None
    ) -> Iterator[set[Part]]:
        """Run the block with the parts on the device; it adds the parts to store to the set it gets."""
        slice, buffer = self.slices[index], self._buffer_of[index]
        changed: set[Part] = set()
        try:
            # Mostly prefetched, so that this submits nothing. Stores of the slice that had this buffer before were
            # submitted earlier to the same thread: no load overwrites bytes that are still to be stored.
            self._load(index, parts)
            buffer.wait_for_copies()
            for part in parts:  # weights first: torch requires a gradient to match its parameter
                if part in buffer.parts:
                    slice.attach(part, buffer.memory(part))
            # Into the buffer in use it would overwrite weights under the running kernels.
            if prefetch is not None and self._buffer_of[prefetch[0]] is not buffer:
                self._load(*prefetch)
            yield changed
            for part in changed:
                slice.gather(part, buffer.memory)
            changed = {part for part in changed if slice.stored(part) is not None}
        except BaseException:
            # A buffer may be half loaded or half updated: no later visit may rely on what it holds.
            self.invalidate()
            raise
        finally:
            slice.detach()
        # In the background, while the next slice computes. The buffer keeps the bytes, so a visit that returns to this
        # slice at once loads nothing.
        for part in changed:
            stored = slice.stored(part)
            assert stored is not None, "a part that has changed has been gathered"
            buffer.parts.add(part)
            memory = buffer.memory(part, stored.layout.nbytes)
            buffer.pending.append(self.worker.store(stored.region, memory))

    def _load(self, index: int, parts: Sequence[Part]) -> None:
        """Start to load the parts that the slice's buffer does not hold yet."""
        slice, buffer = self.slices[index], self._buffer_of[index]
        if buffer.slice != index:
            buffer.slice, buffer.parts = index, set()
        for part in parts:
            stored = slice.stored(part)
            if stored is not None and part not in buffer.parts:
                buffer.parts.add(part)
                memory = buffer.memory(part, stored.layout.nbytes)
                # A slice always uses the same buffer, so only stores from this buffer can have filled its regions.
                buffer.pending.append(self.worker.load(stored.region, memory, after=buffer.pending))


@final
class DeviceBuffer:
    """Memory on the device that holds one slice after another."""

    def __init__(
        self, device: torch.device, worker: TransferWorker, weight_bytes: Mapping[Part, int]
    ) -> None:
        self._device, self._worker = device, worker
        self._memory: dict[Part, Tensor] = {}
        self.slice: int | None = None
        self.parts: set[Part] = set()
        self.pending: list[Copy] = []
        """Copies that no stream has waited for yet."""
        # Allocated once for the largest slice and never again, because autograd holds views of the weights.
        for part, nbytes in weight_bytes.items():
            self.memory(part, nbytes)

    def memory(self, part: Part, nbytes: int | None = None) -> Tensor:
        """At least `nbytes` bytes for a part, or what it has now; its content stays if it is large enough."""
        memory = self._memory.get(part)
        # Only weights are bound to one address. State and gradients are attached again in every visit, so they may
        # move.
        if memory is None or (nbytes is not None and len(memory) < nbytes):
            # The memory to replace is freed first, and a copy that still reads it would keep it from being reused.
            del memory
            self.finish_copies()
            self._memory.pop(part, None)
            memory = torch.empty(nbytes or 0, dtype=torch.uint8, device=self._device)
            assert memory.data_ptr() % ALIGNMENT == 0, "torch aligns memory at least as well"
            self._worker.keep_alive(memory)
            self._memory[part] = memory
        return memory if nbytes is None else memory[:nbytes]

    def wait_for_copies(self) -> None:
        """Let what the calling thread queues from now on use the memory."""
        pending, self.pending = self.pending, []
        self._worker.wait(pending)
        for memory in self._memory.values():
            keep_alive(memory)

    def finish_copies(self) -> None:
        """Wait on the host until no copy uses the memory or the tier any more."""
        pending, self.pending = self.pending, []
        self._worker.finish(pending)


def _largest(part: Part, slices: Iterable[Slice]) -> int:
    """The bytes of a part in the slice that has the most of it."""
    stored = (slice.stored(part) for slice in slices)
    return max((each.layout.nbytes for each in stored if each is not None), default=0)


MAX_INPUTS_IN_FLIGHT = 2


@final
class InputStore:
    """Stores the inputs of slices on the tier until their backward recomputes from them."""

    def __init__(self, tier: Tier, device: torch.device, worker: TransferWorker) -> None:
        self._tier, self._device, self._worker = tier, device, worker
        self._free: dict[int, list[Region]] = {}
        """Regions to reuse, by their size in bytes."""
        self._in_flight: deque[_StoredInput] = deque()
        """The inputs whose memory the copies to the tier may still read."""

    def store(self, input: PartitionInput) -> _StoredInput | None:
        """None for an input that stays: its tensors would come back with other strides or another alignment."""
        tensors = [tensor for tensor in input.tensors if tensor is not None]
        layout = Layout(tensors)
        if any(
            slot.stride != tensor.stride() or tensor.data_ptr() % ALIGNMENT
            for slot, tensor in zip(layout.slots, tensors, strict=True)
        ):
            return None
        while len(self._in_flight) >= MAX_INPUTS_IN_FLIGHT:
            self._in_flight.popleft().release()
        size = min((size for size in self._free if size >= layout.nbytes and self._free[size]), default=None)
        free = self._free.setdefault(layout.nbytes if size is None else size, [])
        region = self._tier.region(layout.nbytes) if size is None else free.pop()
        copies = [
            self._worker.store(region, as_bytes(tensor), slot.begin)
            for slot, tensor in zip(layout.slots, tensors, strict=True)
        ]
        stored = _StoredInput(input, layout, region, copies, self._device, self._worker)
        self._in_flight.append(stored)
        # The region is free again once nobody can ask for the input any more.
        weakref.finalize(stored, free.append, region)
        return stored

    def close(self) -> None:
        """Does not raise what a copy raised: the step has reported it, and no step will load these inputs."""
        for stored in self._in_flight:
            self._worker.finish([copy for copy in stored.copies if copy.exception() is None])
        self._in_flight.clear()


@final
class _StoredInput:
    """Returns an input each time it is called."""

    def __init__(
        self,
        input: PartitionInput,
        layout: Layout,
        region: Region,
        copies: list[Copy],
        device: torch.device,
        worker: TransferWorker,
    ) -> None:
        self._present = [tensor is not None for tensor in input.tensors]
        self._without_tensors = input._replace(tensors=())
        self._layout, self._region, self.copies = layout, region, copies
        self._device, self._worker = device, worker
        # The host frees tensors long before the device has copied them. To free them after a wait in the stream that
        # computes is to reuse their memory in a fixed order, whichever is faster: `record_stream` would leave it to
        # timing how many inputs are in memory at a time.
        self._source: tuple[Tensor | None, ...] = input.tensors

    def release(self) -> None:
        """Free the memory that the input had, once the copies have been done."""
        if self._source:
            self._worker.wait(self.copies)
            self._source = ()

    def __call__(self) -> PartitionInput:
        self.release()
        memory = torch.empty(self._layout.nbytes, dtype=torch.uint8, device=self._device)
        # Not on the worker's thread, where it would wait for the slice that is being prefetched.
        self._worker.load_now(self._region, memory)
        views = iter([slot.view(memory) for slot in self._layout.slots])
        tensors: list[Tensor | None] = [next(views) if present else None for present in self._present]
        return self._without_tensors._replace(tensors=tuple(tensors))
