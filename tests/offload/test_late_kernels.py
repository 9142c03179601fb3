"""The host touches bytes of a device's copies only when they are done: on simulated devices, kernels run late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import nn

from gpipe_cli.accelerator import streams
from gpipe_cli.offload import OffloadModel
from gpipe_cli.offload.staging import Staging
from gpipe_cli.offload.tiers import CpuTier
from gpipe_cli.offload.transfers import TransferWorker
from gpipe_cli.torch_internals.tensor_memory import exchanges_memory
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
    Staging().store(bytes_of(7, device), lambda host, _: drained.append(host.clone()))
    assert torch.equal(drained[0], torch.full((BYTES,), 7, dtype=torch.uint8))


def test_a_staging_buffer_is_filled_again_when_the_device_has_read_it(device: torch.device) -> None:
    staging = Staging(count=1)
    loaded = [torch.empty(BYTES, dtype=torch.uint8, device=device) for _ in range(3)]
    for value, memory in enumerate(loaded):
        staging.load(memory, lambda host, _, value=value: host.fill_(value))
    assert [memory.float().mean().item() for memory in loaded] == [0, 1, 2]


@pytest.mark.parametrize("side_streams", [True, False])
def test_the_host_reads_what_was_stored_when_the_copy_is_done(
    device: torch.device, side_streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not side_streams:
        monkeypatch.setattr(streams, "has_side_streams", lambda device: False)
    tier = CpuTier(device)
    tier.reserve(BYTES)
    region = tier.region(BYTES)
    with closing(TransferWorker(device)) as worker:
        memory = bytes_of(5, device)
        worker.finish([worker.store(region, memory)])
        stored = region.memory
        assert stored is not None and stored.float().mean().item() == 5


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
