from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from gpipe_cli.engines.devices import available, default_partitions, resolve_devices, set_threads
from gpipe_cli.errors import ConfigError

CPU = torch.device("cpu")


def gpus(count: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(count)]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


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
        (5, "devices=5: this machine has 4 CUDA devices; give at most that many"),
        (["cuda:4"], "'cuda:4' is not here, this machine has 4 CUDA devices"),
        ([4], "'4' is not here"),
        (["meta"], "'meta' cannot be used; cpu and cuda can"),
        (["nonsense"], "'nonsense' is no device; write cpu, cuda:0 or a number"),
        (["cpu", "cpu:x"], "'cpu:x' is no device"),
    ],
)
def test_what_is_not_there_is_named(devices: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        available(devices)


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
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    assert set_threads(threads, devices) == expected
    assert told == [expected]
