from __future__ import annotations

from typing import Any

import pytest
import torch

from gpipe_cli.accelerator.counters import PEAK, peak_bytes, reset_peaks


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
