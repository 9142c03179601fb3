"""Which slices are loaded when, and what a recorded step shows of it."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli.errors import ResourceError
from gpipe_cli.offload.offloaded_pipe import offloaded_pipe
from gpipe_cli.offload.prefetcher import InputStore, SlicePrefetcher
from gpipe_cli.offload.slices import Part, SlicedParameters
from gpipe_cli.offload.tiers import CpuTier, DiskTier, Tier
from gpipe_cli.offload.transfers import TransferWorker
from gpipe_cli.pipeline.boundary import PartitionInput
from gpipe_cli.pytree import flatten
from gpipe_cli.schedule.action import Action
from gpipe_cli.torch_internals.tensors import exchanges_memory
from tests.accelerator.simulator import Simulator

CPU = torch.device("cpu")


class Watched:
    """A tier that writes down which of its regions are read and written."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.reserve, self.close, self.frees_memory_of = tier.reserve, tier.close, lambda device: False
        self.moves: list[str] = []
        self._count = 0

    def region(self, nbytes: int) -> Any:
        region, name = self._tier.region(nbytes), self._count
        self._count += 1
        read, write = region.read, region.write

        def noted_read(begin: int, into: Tensor) -> None:
            self.moves.append(f"read {name}")
            read(begin, into)

        def noted_write(begin: int, source: Tensor) -> None:
            self.moves.append(f"write {name}")
            write(begin, source)

        region.read, region.write = noted_read, noted_write  # type: ignore[method-assign]
        return region


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    tier = Watched(DiskTier(tmp_path))
    yield tier
    tier.close()


def make_prefetcher(module: nn.Sequential, tier: Tier, **settings: Any) -> SlicePrefetcher:
    slices = SlicedParameters.of(module, [1] * len(module)).store(tier)
    return SlicePrefetcher(slices, tier, CPU, **settings)


def step(
    module: nn.Sequential, prefetcher: SlicePrefetcher, recorder: Any = None, checkpoint: str = "always"
) -> None:
    pipe = offloaded_pipe(
        module, [1] * len(module), devices=[CPU], stores=[prefetcher], chunks=2, checkpoint=checkpoint
    )
    pipe.recorder = recorder
    pipe.step(torch.ones(4, 4), torch.zeros(4, 4), nn.functional.mse_loss, key=1)
    pipe.close()


def test_each_slice_is_read_once_in_forward_and_once_in_backward(watched: Watched) -> None:
    module = model()
    prefetcher = make_prefetcher(module, watched)
    watched.moves.clear()
    step(module, prefetcher)
    prefetcher.wait_until_stored()
    # When backward begins, the two buffers still hold the last slice and the one before it.
    assert watched.moves == ["read 0", "read 1", "read 2", "read 0"]
    prefetcher.close()


def test_a_backward_in_one_thread_took_all_partitions_from_the_first_workers_store(tmp_path: Path) -> None:
    """Accelerators need that backward; here it is forced on CPUs."""
    results = []
    for in_caller in (False, True):
        module, tier = model(), DiskTier(tmp_path)
        slices = SlicedParameters.of(module, [1, 1, 1]).store(tier)
        stores = [
            SlicePrefetcher({index: slices[index] for index in own}, tier, CPU) for own in ([0, 2], [1])
        ]
        pipe = offloaded_pipe(
            module, [1, 1, 1], devices=[CPU, CPU], stores=stores, schedule="interleaved", chunks=2
        )
        pipe._runner._backward_in_caller = in_caller
        input = torch.ones(4, 4, requires_grad=True)
        pipe(input).square().mean().backward()
        results.append([input.grad, *(parameter.grad for parameter in module.parameters())])
        pipe.close()
        for store in stores:
            store.close()
        tier.close()
    assert all(gradient is not None for gradient in results[0])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_with_one_buffer_each_slice_is_read_when_it_is_needed(watched: Watched) -> None:
    module = model()
    prefetcher = make_prefetcher(module, watched, buffers=1, in_background=False)
    watched.moves.clear()
    step(module, prefetcher)
    assert watched.moves == ["read 0", "read 1", "read 2", "read 1", "read 0"]
    prefetcher.close()


def test_a_recorded_step_shows_loads_and_drops(watched: Watched) -> None:
    class Recorder:
        events: list[str]

        def __init__(self) -> None:
            self.events = []

        def now(self, device: torch.device) -> int:
            return len(self.events)

        def __call__(self, action: Action, phase: str, begin: Any, end: Any) -> None:
            if phase != "copy":
                self.events.append(f"{phase} {action}")

    module, recorder = model()[:2], Recorder()
    prefetcher = make_prefetcher(module, watched)
    step(module, prefetcher, recorder)
    assert recorder.events == [
        "load F0.0",
        "forward F0.0",
        "forward F0.1",
        "drop F0.1",
        "load F1.0",
        "forward F1.0",
        "forward F1.1",
        "recompute B1.0",
        "backward B1.0",
        "recompute B1.1",
        "backward B1.1",
        "drop B1.1",
        "load B0.0",
        "recompute B0.0",
        "backward B0.0",
        "recompute B0.1",
        "backward B0.1",
        "drop B0.1",
    ]
    prefetcher.close()


def test_weights_return_to_the_address_that_autograd_saved(watched: Watched) -> None:
    """Without recomputation the graph of a forward holds views of the weights: they must find the same numbers."""
    module, plain = model(), model()
    prefetcher = make_prefetcher(module, watched)
    step(module, prefetcher, checkpoint="never")
    for half in torch.ones(4, 4).chunk(2):
        (nn.functional.mse_loss(plain(half), torch.zeros(2, 4)) / 2).backward()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
    prefetcher.close()


def test_a_tour_loads_every_slice_and_stores_what_changed(watched: Watched) -> None:
    module = model()
    before = [watched_value.clone() for watched_value in model().parameters()]
    prefetcher = make_prefetcher(module, watched)
    for slice in prefetcher.iter_loaded([Part.WEIGHTS], [Part.WEIGHTS]):
        with torch.no_grad():
            for parameter in slice.parameters:
                parameter.add_(1)
    prefetcher.wait_until_stored()
    prefetcher.invalidate()
    after = [
        parameter.detach().clone()
        for slice in prefetcher.iter_loaded([Part.WEIGHTS], [])
        for parameter in slice.parameters
    ]
    for mine, theirs in zip(after, before, strict=True):
        assert torch.equal(mine, theirs + 1)
    prefetcher.close()


def test_a_disk_error_is_raised_where_the_copy_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = model()
    prefetcher = make_prefetcher(module, DiskTier(tmp_path))

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ResourceError, match="cannot be stored there: Input/output error"):
        step(module, prefetcher)
    prefetcher.close()


CPU = torch.device("cpu")


def partition_input(*tensors: torch.Tensor | None) -> PartitionInput:
    needs_grad = tuple(tensor is not None for tensor in tensors)
    return PartitionInput(tensors, needs_grad, flatten(tensors, "output")[1], value_count=len(tensors))


def test_a_stored_input_can_be_read_any_number_of_times(tmp_path: Path) -> None:
    worker = TransferWorker(CPU)
    inputs = InputStore(DiskTier(tmp_path), CPU, worker)
    given = partition_input(
        torch.randn(3, 4, 5), None, torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    )
    stored = inputs.store(given)
    assert stored is not None
    for _ in range(2):
        read = stored()
        assert read._replace(tensors=()) == given._replace(tensors=())
        for mine, theirs in zip(read.tensors, given.tensors, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
    assert worker.transfers.moved_bytes > 0
    worker.close()


def test_stored_inputs_do_not_mix_and_a_region_is_reused_once_its_input_is_dropped(
    tmp_path: Path,
) -> None:
    tier, worker = DiskTier(tmp_path), TransferWorker(CPU, in_background=False)
    regions: list[int] = []
    make = tier.region
    tier.region = lambda nbytes: regions.append(nbytes) or make(nbytes)  # type: ignore[method-assign,func-returns-value]
    inputs = InputStore(tier, CPU, worker)
    first, second = (
        inputs.store(partition_input(torch.zeros(9))),
        inputs.store(partition_input(torch.ones(9))),
    )
    assert first is not None and second is not None
    assert torch.equal(first().value[0], torch.zeros(9)) and torch.equal(second().value[0], torch.ones(9))
    assert len(regions) == 2
    del first
    gc.collect()
    third = inputs.store(partition_input(torch.full((9,), 2.0)))
    assert third is not None and len(regions) == 2
    assert torch.equal(second().value[0], torch.ones(9))


def test_a_tensor_with_holes_stays(tmp_path: Path) -> None:
    inputs = InputStore(DiskTier(tmp_path), CPU, TransferWorker(CPU, in_background=False))
    assert inputs.store(partition_input(torch.randn(4, 6)[:, ::2])) is None
    assert inputs.store(partition_input(torch.randn(4, 1).expand(4, 3))) is None


@pytest.mark.accelerator
@pytest.mark.parametrize(
    ("visited", "changed"),
    [
        pytest.param(1, (), id="the second slice is being loaded"),
        pytest.param(2, (Part.WEIGHTS,), id="the first slice is being stored"),
    ],
)
def test_the_memory_of_slices_outlives_copies_that_nobody_awaited_and_kernels_of_other_streams(
    simulated: Simulator, visited: int, changed: tuple[Part, ...]
) -> None:
    device = simulated.devices[0]
    if not exchanges_memory(device):
        pytest.skip("torch cannot give memory of this kind of device to a parameter of the host")
    module, tier = model()[:2], CpuTier([device])
    prefetcher = SlicePrefetcher(SlicedParameters.of(module, [1, 1]).store(tier), tier, device)
    torch.accelerator.synchronize(device)
    simulated.reset()
    with torch.Stream(device):
        slices = prefetcher.iter_loaded([Part.WEIGHTS], changed)
        for index in range(visited):
            next(slices)
            module[index].weight.sum()
        slices.close()
    for buffer in prefetcher._buffers:
        for copy in buffer.pending:
            copy.result()  # it is queued now, and no stream waits for it
    prefetcher.close()
    del buffer, copy, prefetcher, slices, module, tier
    gc.collect()
    assert simulated.host_syncs() == []


@pytest.mark.accelerator
def test_an_input_outlives_the_copy_to_its_tier_when_the_store_closes(simulated: Simulator) -> None:
    device = simulated.devices[0]
    worker = TransferWorker(device)
    inputs = InputStore(CpuTier([device]), device, worker)
    stored = inputs.store(partition_input(torch.ones(9, device=device)))
    inputs.close()
    worker.close()
    del stored, inputs
    gc.collect()
    assert simulated.races() == []


def test_a_store_whose_copy_failed_closes_without_raising(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has reported the failure; closing used to raise it again, and left the thread running."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    worker = TransferWorker(CPU)
    inputs = InputStore(DiskTier(tmp_path), CPU, worker)
    monkeypatch.setattr(os, "pwritev", full)
    stored = inputs.store(partition_input(torch.ones(9)))
    assert stored is not None
    with pytest.raises(ResourceError, match="No space left on device"):
        stored()
    inputs.close()
    worker.close()
