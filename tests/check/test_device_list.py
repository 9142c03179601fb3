from __future__ import annotations

import pytest
import torch

from gpipe_cli.check import device_list
from gpipe_cli.check.device_list import check_devices
from gpipe_cli.check.row import Machine, Verdict

GPU = Machine.of([torch.device("cuda", 0)])


def test_a_cpu_is_described_by_its_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_list, "available_cores", lambda: 2)
    (row,) = check_devices(Machine.of([torch.device("cpu")]))
    assert (row.name, row.verdict, row.to_do) == ("device cpu", Verdict.OK, "")
    assert row.figures["cores"] == 2 and row.figures["threads"] == torch.get_num_threads()


def test_a_single_core_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_list, "available_cores", lambda: 1)
    (row,) = check_devices(Machine.of([torch.device("cpu")]))
    assert row.verdict is Verdict.NOTE and "second" in row.to_do


@pytest.mark.parametrize(("free", "verdict"), [(70, Verdict.OK), (20, Verdict.NOTE)])
def test_an_accelerator_that_others_use_is_a_note(
    free: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_list, "device_name", lambda device: "A100")
    monkeypatch.setattr(device_list, "compute_capability", lambda device: "8.0")
    monkeypatch.setattr(device_list, "free_and_total_bytes", lambda device: (free * 2**30, 80 * 2**30))
    (row,) = check_devices(GPU)
    assert row.verdict is verdict
    assert row.result == f"A100, compute capability 8.0, {free}.00 GiB of 80.00 GiB free"
    assert ("leave it out of devices=[...]" in row.to_do) == (verdict is Verdict.NOTE)


def test_an_accelerator_without_counters_is_described_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_list, "device_name", lambda device: "M3")
    monkeypatch.setattr(device_list, "compute_capability", lambda device: None)
    monkeypatch.setattr(device_list, "free_and_total_bytes", lambda device: None)
    (row,) = check_devices(GPU)
    assert (row.verdict, row.result) == (Verdict.OK, "M3, torch cannot count its memory")
