"""The host touches bytes of a device's copies only when they are done: on simulated devices, kernels run late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.accelerator import streams
from gpipe_cli.engines import offload
from gpipe_cli.engines.protocol import EngineSpec, TrainingObjective
from gpipe_cli.losses.measures import accuracy
from gpipe_cli.offload import OffloadModel, tiers
from gpipe_cli.offload.prefetcher import SlicePrefetcher
from gpipe_cli.offload.slices import Part, SlicedParameters
from gpipe_cli.offload.tiers import CpuTier
from gpipe_cli.offload.transfers import TransferWorker
from gpipe_cli.profiling.records import Sample
from gpipe_cli.torch_internals.tensors import exchanges_memory
from tests.accelerator.simulator import Simulator

pytestmark = pytest.mark.accelerator

BYTES = 1000


@pytest.fixture
def device(simulated: Simulator) -> Iterator[torch.device]:
    with simulated.asynchronous(microseconds=20_000):
        yield simulated.devices[0]


def bytes_of(value: int, device: torch.device) -> torch.Tensor:
    """Memory of a device that gets its value late."""
    return torch.full((BYTES,), value, dtype=torch.uint8, device=device)


def test_bytes_are_drained_to_a_file_when_they_have_come_from_the_device(device: torch.device) -> None:
    drained = []
    tiers.Staging().store(bytes_of(7, device), lambda host, _: drained.append(host.clone()))
    assert torch.equal(drained[0], torch.full((BYTES,), 7, dtype=torch.uint8))


@pytest.mark.parametrize("side_streams", [True, False])
def test_a_staging_buffer_is_filled_again_when_the_device_has_read_it(
    device: torch.device, side_streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not side_streams:
        for module in (streams, tiers):
            monkeypatch.setattr(module, "has_side_streams", lambda device: False)
    buffers = tiers.Staging(count=1)
    loaded = [torch.empty(BYTES, dtype=torch.uint8, device=device) for _ in range(3)]
    for value, memory in enumerate(loaded):
        buffers.load(memory, lambda host, _, value=value: host.fill_(value))
    assert [memory.float().mean().item() for memory in loaded] == [0, 1, 2]


@pytest.mark.parametrize("side_streams", [True, False])
def test_the_host_reads_what_was_stored_when_the_copy_is_done(
    device: torch.device, side_streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not side_streams:
        monkeypatch.setattr(streams, "has_side_streams", lambda device: False)
    tier = CpuTier([device])
    tier.reserve(BYTES)
    region = tier.region(BYTES)
    with closing(TransferWorker(device)) as worker:
        memory = bytes_of(5, device)
        worker.finish([worker.store(region, memory)])
        stored = region.memory
        assert stored is not None and stored.float().mean().item() == 5


def test_slices_are_read_from_their_tier_when_they_are_stored(device: torch.device) -> None:
    if not exchanges_memory(device):
        pytest.skip("torch cannot give memory of this kind of device to a parameter of the host")
    module, tier = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), CpuTier([device])
    slices = SlicedParameters.of(module, [1, 1]).store(tier)
    prefetcher = SlicePrefetcher(slices, tier, device)
    for slice in prefetcher.iter_loaded([Part.WEIGHTS], [Part.WEIGHTS]):
        for parameter in slice.trained:
            parameter.data.fill_(3)
    prefetcher.wait_until_stored()
    regions = [
        stored.region for slice in slices.values() if (stored := slice.stored(Part.WEIGHTS)) is not None
    ]
    values = [region.memory.clone() for region in regions]
    prefetcher.close()
    assert len(values) == 2 and all(value[:64].view(torch.float32).eq(3).all() for value in values)


def test_the_state_of_the_engine_is_what_the_last_update_stored(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, wait = tiers._CpuRegion.write, SlicePrefetcher.wait_until_stored
    awaited = threading.Event()

    def write_when_awaited(self: Any, begin: int, source: torch.Tensor) -> None:
        assert awaited.wait(60), "nobody waits until the tier holds the slice"
        write(self, begin, source)

    def wait_for_late_copies(self: SlicePrefetcher) -> None:
        awaited.set()
        wait(self)

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = partial(torch.optim.SGD, lr=0.0)
    objective = TrainingObjective(nn.CrossEntropyLoss(), accuracy, optimizer)
    batch = torch.randn(3, 4), torch.tensor([0, 1, 2])
    sample = Sample(*batch, objective.loss)
    spec = EngineSpec(
        module,
        objective,
        [2],
        [device],
        chunks=1,
        eval_chunks=1,
        scratch=tmp_path,
        make_sample=lambda: sample,
    )
    with closing(offload.build(spec, slices=2)) as engine:
        monkeypatch.setattr(tiers._CpuRegion, "write", write_when_awaited)
        monkeypatch.setattr(SlicePrefetcher, "wait_until_stored", wait_for_late_copies)
        engine.train_step(batch, key=0, lr=1.0, measure=False)
        state = engine.state()
        found = [state.value(tensor).clone() for tensor in state.model.values()]
        awaited.set()  # closing waits for the thread that copies
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for parameter, weight in zip(plain.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    nn.functional.cross_entropy(plain(batch[0]), batch[1]).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, plain.parameters(), strict=True))


def test_the_caller_reads_gradients_and_writes_parameters_right_after_the_call(device: torch.device) -> None:
    if not exchanges_memory(device):
        pytest.skip("torch cannot give memory of this kind of device to a parameter of the host")
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    input = torch.randn(3, 4)
    expected = layers(input)
    wanted = torch.autograd.grad(expected.sum(), list(layers.parameters()))
    with OffloadModel(layers, device, num_slices=2) as model:
        output = model(input.to(device))
        values = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.zero_()
        assert torch.equal(output.detach().cpu(), expected)
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.data.copy_(value)
        model(input.to(device)).sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, wanted, strict=True))
