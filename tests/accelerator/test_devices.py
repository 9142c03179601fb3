from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_cli import GPipe
from gpipe_cli.accelerator.devices import choose_devices, device_here


def accelerators(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int) -> None:
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(("kind", "count"), [(None, 0), ("cuda", 0)])
@pytest.mark.parametrize("device", [0, 4, -1, "cuda:4", "cuda", torch.device("cuda", 1), "xpu:0"])
def test_a_device_that_is_not_here_was_silently_a_cpu_worker(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int, device: int | str | torch.device
) -> None:
    accelerators(monkeypatch, kind, count)
    with pytest.raises(IndexError, match=r"is not here: this machine has 0 accelerators; write 'cpu'"):
        GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=[device, "cpu"])


@pytest.mark.parametrize("device", [2, -1, "cuda:2", "xpu:0"])
def test_the_devices_that_are_here_are_counted(
    monkeypatch: pytest.MonkeyPatch, device: int | str | torch.device
) -> None:
    accelerators(monkeypatch, "cuda", 2)
    with pytest.raises(IndexError, match=r"is not here: this machine has 2 accelerators; write 0 to 1"):
        device_here(device)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_numbers_count_the_accelerators_whatever_they_are(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    accelerators(monkeypatch, kind, 2)
    both = [torch.device(kind, 0), torch.device(kind, 1)]
    assert choose_devices(None, 2, repeats=False) == choose_devices([0, 1], 2, repeats=False) == both
    assert choose_devices([f"{kind}:1", "cpu"], 2, repeats=False) == [both[1], torch.device("cpu")]


@pytest.mark.parametrize("device", ["nonsense", "cpu:x", None, 1.5])
def test_what_is_no_device_is_refused_by_its_name(device: object) -> None:
    with pytest.raises(ValueError, match=r"^device .* does not exist; write 'cpu', 'cuda:0' or a number$"):
        device_here(device)
