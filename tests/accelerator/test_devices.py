from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli import GPipe
from gpipe_cli.accelerator.devices import (
    PEAK,
    available_devices,
    choose_devices,
    default_partitions,
    device_here,
    device_name,
    peak_bytes,
    reads_pinned_memory,
    reset_peaks,
    resolve_devices,
    set_threads,
)
from gpipe_cli.errors import ConfigError

CPU = torch.device("cpu")


def accelerators(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int) -> None:
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)


@pytest.mark.parametrize(("kind", "count"), [(None, 0), ("cuda", 0)])
@pytest.mark.parametrize("device", [0, 4, -1, "cuda:4", "cuda", torch.device("cuda", 1), "xpu:0"])
def test_a_missing_device_was_silently_a_cpu_worker(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int, device: int | str | torch.device
) -> None:
    accelerators(monkeypatch, kind, count)
    with pytest.raises(IndexError, match=r"does not exist: this machine has 0 accelerators; write 'cpu'"):
        GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=[device, "cpu"])


@pytest.mark.parametrize("device", [2, -1, "cuda:2", "xpu:0"])
def test_the_devices_that_are_here_are_counted(
    monkeypatch: pytest.MonkeyPatch, device: int | str | torch.device
) -> None:
    accelerators(monkeypatch, "cuda", 2)
    with pytest.raises(
        IndexError, match="does not exist: this machine has 2 accelerators of type cuda; write 0 to 1"
    ):
        device_here(device)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_numbers_count_the_accelerators_whatever_they_are(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    accelerators(monkeypatch, kind, 2)
    both = [torch.device(kind, 0), torch.device(kind, 1)]
    assert choose_devices(None, 2, repeats=False) == choose_devices([0, 1], 2, repeats=False) == both
    assert choose_devices([f"{kind}:1", "cpu"], 2, repeats=False) == [both[1], torch.device("cpu")]


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_a_device_without_an_index_was_another_device_than_its_own_tensors(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A tensor names its device with an index, so each boundary between "cuda" and "cuda:0" was a copy."""
    accelerators(monkeypatch, kind, 2)
    first, second = torch.device(kind, 0), torch.device(kind, 1)
    assert choose_devices([kind, first, "cpu:0"], 3, repeats=False) == [first, first, CPU]
    assert available_devices([kind, f"{kind}:0", 0, "cpu:0"]) == [first, first, first, CPU]
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert device_here(kind) == second


@pytest.mark.parametrize("kind", ["xpu", "mps", "cuda"])
def test_a_configuration_takes_accelerators_of_every_kind(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    accelerators(monkeypatch, kind, 2)
    both = [torch.device(kind, 0), torch.device(kind, 1)]
    assert available_devices("auto") == available_devices([0, f"{kind}:1"]) == available_devices(2) == both


@pytest.mark.parametrize("device", ["nonsense", "cpu:x", None, 1.5])
def test_what_is_no_device_is_refused_by_its_name(device: object) -> None:
    with pytest.raises(ValueError, match=r"^device .* does not exist; write 'cpu', 'cuda:0' or a number$"):
        device_here(device)


def gpus(count: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(count)]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(monkeypatch, "cuda", 4)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerators(monkeypatch, None, 0)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("devices", "partitions", "resolved"),
    [
        ("auto", 2, [CPU] * 3),
        (1, 1, [CPU]),
        (2, 2, [CPU] * 2),
        (3, 3, [CPU] * 3),
        (["cpu"], 1, [CPU]),
        (["cpu", "cpu"], 2, [CPU] * 2),
    ],
)
def test_without_a_gpu_the_cpu_is_used(devices: Any, partitions: int, resolved: list[torch.device]) -> None:
    assert default_partitions(devices) == partitions
    assert resolve_devices(devices, 3) == resolved


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("devices", "partitions", "resolved"),
    [
        ("auto", 4, gpus(3)),
        (2, 2, gpus(2)),
        ([1, "cuda:3"], 2, [torch.device("cuda", 1), torch.device("cuda", 3)]),
        (["cpu", 0], 2, [CPU, torch.device("cuda", 0)]),
        ([0, 0], 2, [torch.device("cuda", 0)] * 2),
    ],
)
def test_with_gpus_they_are_used(devices: Any, partitions: int, resolved: list[torch.device]) -> None:
    assert default_partitions(devices) == partitions
    assert resolve_devices(devices, 3) == resolved


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("devices", "says"),
    [
        (5, "devices=5: this machine has 4 accelerators; give at most that many"),
        (
            ["cpu", "cuda:4"],
            r"devices=\[cpu,cuda:4\]: device 'cuda:4' does not exist: this machine has 4 accelerators of type cuda; "
            "write 0 to 3",
        ),
        ([4], r"devices=\[4\]: device 4 does not exist"),
        (
            ["xpu"],
            r"devices=\[xpu\]: device 'xpu' does not exist: this machine has 4 accelerators of type cuda",
        ),
        (["meta"], r"devices=\[meta\]: device 'meta' computes nothing; write 'cpu', 'cuda:0' or a number"),
        (["nonsense"], "device 'nonsense' does not exist; write 'cpu', 'cuda:0' or a number"),
        (["cpu", "cpu:x"], "device 'cpu:x' does not exist"),
    ],
)
def test_what_is_not_there_is_named(devices: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        available_devices(devices)


@pytest.mark.parametrize(
    ("threads", "devices", "expected"),
    [
        ("auto", [CPU, CPU], 1),
        ("auto", [CPU], os.cpu_count()),
        ("auto", gpus(2), os.cpu_count()),
        ("auto", [CPU, *gpus(1)], os.cpu_count()),
        (3, [CPU, CPU], 3),
    ],
)
def test_workers_that_share_the_cpu_get_one_thread_each(
    monkeypatch: pytest.MonkeyPatch, threads: Any, devices: list[torch.device], expected: int
) -> None:
    thread_counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", thread_counts.append)
    assert set_threads(threads, devices) == expected
    assert thread_counts == [expected]


def test_a_device_is_named_by_the_module_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(get_device_name=lambda device: f"Accelerator {device.index}")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert device_name(torch.device("xpu:1")) == "Accelerator 1"
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert device_name(torch.device("mps")) == "mps"


@pytest.mark.parametrize(
    ("kinds", "pinned"), [("cpu", False), ("cpu cuda", True), ("xpu", True), ("mps", False)]
)
def test_only_accelerators_read_pinned_memory(kinds: str, pinned: bool) -> None:
    assert reads_pinned_memory([torch.device(kind) for kind in kinds.split()]) == pinned


def test_a_cpu_keeps_no_counters() -> None:
    assert peak_bytes(torch.device("cpu")) is None
    reset_peaks([torch.device("cpu")])


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_a_device_whose_allocator_keeps_none_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(device: Any) -> Any:
        raise error("Allocator for mps is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "memory_stats", refuse)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", refuse)
    assert peak_bytes(torch.device("mps")) is None
    reset_peaks([torch.device("mps")])


def test_peaks_are_counted_from_a_reset_on(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {torch.device("xpu:0"): 7, torch.device("xpu:1"): 9}
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: {PEAK: peaks[device]})
    monkeypatch.setattr(
        torch.accelerator, "reset_peak_memory_stats", lambda device: peaks.update({device: 0})
    )
    reset_peaks([torch.device("xpu:0")])
    assert [peak_bytes(device) for device in peaks] == [0, 9]
