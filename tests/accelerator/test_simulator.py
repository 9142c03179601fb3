"""The simulated accelerator itself: it finds every kind of race, and says of nothing else that it is one."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator.simulator import Simulator, build, missing_requirement

ROWS = 1000


def write_after_write(tensor: Tensor, side: torch.Stream) -> None:
    with side:
        tensor.add_(1)


def read_after_write(tensor: Tensor, side: torch.Stream) -> None:
    with side:
        tensor.sum()


def write_after_read(tensor: Tensor, side: torch.Stream) -> None:
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tensor.sum()
    tensor.add_(1)


def reuse(tensor: Tensor, side: torch.Stream) -> None:
    temporary = tensor + 1
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        temporary.sum()
    del temporary


def forget_races(simulated: Simulator) -> None:
    # Dropping a tensor that another stream still uses would be the next race.
    for device in simulated.devices:
        torch.accelerator.synchronize(device)
    simulated.reset()


@pytest.mark.accelerator
@pytest.mark.parametrize(
    ("race", "kind"),
    [
        (write_after_write, "write after write"),
        (read_after_write, "read after write"),
        (write_after_read, "write after read"),
        (reuse, "memory reused without record_stream"),
    ],
)
def test_a_race_is_found_and_says_where(
    simulated: Simulator, race: Callable[[Tensor, torch.Stream], None], kind: str
) -> None:
    device = simulated.devices[0]
    tensor = torch.zeros(ROWS, device=device)
    race(tensor, torch.Stream(device))
    (found,) = simulated.races()
    forget_races(simulated)
    assert found.startswith(kind)
    assert "of device 0\n" in found
    assert f" {race.__name__}\n" in found


@pytest.mark.accelerator
def test_events_waits_and_record_stream_order_streams(simulated: Simulator) -> None:
    device = simulated.devices[0]
    side = torch.Stream(device)
    tensor = torch.zeros(ROWS, device=device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        tensor.add_(1)
        temporary = tensor * 2
        event = side.record_event()
    torch.accelerator.current_stream(device).wait_event(event)
    tensor.add_(1)
    torch.accelerator.current_stream(device).wait_stream(side)
    temporary.record_stream(torch.accelerator.current_stream(device))
    temporary.sum()
    del temporary
    assert simulated.races() == []


@pytest.mark.accelerator
def test_a_host_that_waited_orders_everything_it_launches_later(simulated: Simulator) -> None:
    forget_races(simulated)
    device = simulated.devices[1]
    side = torch.Stream(device)
    tensor = torch.zeros(ROWS, device=device)
    assert not simulated.is_idle()
    torch.accelerator.synchronize(device)
    assert simulated.is_idle()
    with side:
        tensor.add_(1)
    side.synchronize()
    tensor.add_(1)
    assert simulated.races() == []
    assert [sync.splitlines()[0] for sync in simulated.host_syncs()] == [
        "device.synchronize",
        "stream.synchronize",
    ]


@pytest.mark.accelerator
def test_a_copy_between_devices_waits_for_both_current_streams(simulated: Simulator) -> None:
    first, second = simulated.devices[:2]
    source, destination = torch.ones(ROWS, device=first), torch.zeros(ROWS, device=second)
    destination.copy_(source)
    assert destination.sum().item() == ROWS
    destination.zero_()
    with torch.Stream(second):
        destination.copy_(source)
    assert simulated.races()[0].startswith("write after")
    forget_races(simulated)


@pytest.mark.accelerator
def test_reading_values_and_blocking_copies_count_as_host_synchronizations(simulated: Simulator) -> None:
    tensor = torch.ones(ROWS, device=simulated.devices[0])
    pinned = torch.ones(ROWS).pin_memory()
    simulated.reset()
    tensor.copy_(pinned, non_blocking=True)
    pinned.copy_(tensor, non_blocking=True)
    assert simulated.host_syncs() == []
    tensor.sum().item()
    tensor.cpu()
    tensor[tensor > 0]
    assert [sync.splitlines()[0] for sync in simulated.host_syncs()] == [
        "aten::_local_scalar_dense",
        "copy to the host",
        "aten::index",
    ]


@pytest.mark.accelerator
def test_a_full_device_raises_and_counts_its_memory(simulated: Simulator) -> None:
    device = simulated.devices[2]
    before = torch.accelerator.memory_allocated(device)
    with simulated.memory_limit(before + 2**20):
        kept = torch.empty(2**18, device=device)
        assert torch.accelerator.memory_allocated(device) - before == 2**20
        assert torch.accelerator.get_memory_info(device) == (0, before + 2**20)
        with pytest.raises(
            torch.OutOfMemoryError, match=r"Tried to allocate 0.00 MiB. GPU 2 .* 0.00 MiB is free"
        ):
            torch.empty(1, device=device)
    del kept
    assert torch.accelerator.memory_allocated(device) == before
    assert torch.accelerator.max_memory_allocated(device) >= before + 2**20


@pytest.mark.accelerator
def test_a_missing_wait_gives_wrong_numbers_where_kernels_run_late(simulated: Simulator) -> None:
    device = simulated.devices[0]
    side = torch.Stream(device)
    with simulated.asynchronous():
        tensor = torch.empty(ROWS, device=device)
        for value in range(1000):
            tensor.fill_(value)
        with side:
            assert tensor.sum().item() != 999 * ROWS
        assert tensor.sum().item() == 999 * ROWS
        forget_races(simulated)


@pytest.mark.accelerator
def test_an_error_of_a_late_kernel_is_raised_at_a_later_place(simulated: Simulator) -> None:
    with simulated.asynchronous():
        table = torch.ones(2, 4, device=simulated.devices[0])
        rows = torch.tensor([5], device=simulated.devices[0])
        nn.functional.embedding(rows, table)
        with pytest.raises(RuntimeError, match="device-side assert"):
            torch.accelerator.synchronize(simulated.devices[0])


@pytest.mark.accelerator
def test_kernels_give_the_bits_of_the_cpu(simulated: Simulator) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LayerNorm(36),
        nn.Linear(36, 5),
    )
    input = torch.randn(6, 3, 8, 8)
    found = []
    for device in (torch.device("cpu"), simulated.devices[3]):
        layers.to(device).zero_grad()
        layers[1].reset_running_stats()
        nn.functional.cross_entropy(layers(input.to(device)), torch.arange(6, device=device) % 5).backward()
        tensors = {**dict(layers.named_buffers()), **{name: p.grad for name, p in layers.named_parameters()}}
        found.append({name: tensor.cpu().clone() for name, tensor in tensors.items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.accelerator
@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_gives_the_bits_of_the_cpu(simulated: Simulator, masked: bool) -> None:
    torch.manual_seed(0)
    query, key, value, mask = torch.randn(4, 2, 3, 16, 16)
    found = []
    for device in (torch.device("cpu"), simulated.devices[3]):
        inputs = [tensor.detach().to(device).requires_grad_() for tensor in (query, key, value)]
        bias = mask.to(device) if masked else None
        output = nn.functional.scaled_dot_product_attention(*inputs, attn_mask=bias)
        output.square().sum().backward()
        found.append([output.detach().cpu(), *(tensor.grad.cpu() for tensor in inputs)])
        name = "EfficientAttention" if device.type != "cpu" else "ForCpu"
        assert name in type(output.grad_fn).__name__
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert missing_requirement() == "the simulated accelerator needs g++, which is not installed"


def test_another_version_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "TESTED_TORCH", "2.0.0")
    with pytest.raises(
        RuntimeError, match=r"internals of torch 2\.0\.0, and this is torch .* change TESTED_TORCH"
    ):
        build.compiled("cuda")
