from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpipe_cli.check import devices
from gpipe_cli.check.devices import (
    CPU,
    SIZE,
    Link,
    check_counters,
    check_devices,
    check_links,
    judge_counters,
    judge_host_links,
    judge_pairs,
    measure_link,
    pairs_to_measure,
)
from gpipe_cli.check.row import Machine, Verdict

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
DIRECT = Link(FIRST, SECOND, latency_us=9.0, gb_per_second=24.0, peer_access=True)
HOST = {FIRST: 25.0, SECOND: 25.0}
UPLOAD = Link(CPU, FIRST, latency_us=12.0, gb_per_second=25.0, pinned=True)


def test_a_cpu_is_described_by_its_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_cores", lambda: 2)
    (row,) = check_devices(Machine.of([torch.device("cpu")]))
    assert (row.name, row.verdict, row.to_do) == ("device cpu", Verdict.OK, "")
    assert row.figures["cores"] == 2 and row.figures["threads"] == torch.get_num_threads()


def test_a_single_core_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_cores", lambda: 1)
    (row,) = check_devices(Machine.of([torch.device("cpu")]))
    assert row.verdict is Verdict.NOTE and "second" in row.to_do


@pytest.mark.parametrize(("free", "verdict"), [(70, Verdict.OK), (20, Verdict.NOTE)])
def test_an_accelerator_that_others_use_is_a_note(
    free: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "device_name", lambda device: "A100")
    monkeypatch.setattr(devices, "compute_capability", lambda device: "8.0")
    monkeypatch.setattr(devices, "free_and_total_bytes", lambda device: (free * 2**30, 80 * 2**30))
    (row,) = check_devices(Machine.of([FIRST]))
    assert row.verdict is verdict
    assert row.result == f"A100, compute capability 8.0, {free}.00 GiB of 80.00 GiB free"
    assert ("leave it out of devices=[...]" in row.to_do) == (verdict is Verdict.NOTE)


def test_an_accelerator_without_counters_is_described_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device_name", lambda device: "M3")
    monkeypatch.setattr(devices, "compute_capability", lambda device: None)
    monkeypatch.setattr(devices, "free_and_total_bytes", lambda device: None)
    (row,) = check_devices(Machine.of([FIRST]))
    assert (row.verdict, row.result) == (Verdict.OK, "M3, torch cannot count its memory")


def test_a_cpu_has_no_memory_counters() -> None:
    (row,) = check_counters(Machine.of([CPU]))
    assert row.verdict is Verdict.SKIPPED and row.result.startswith("a CPU has none")


def test_an_accelerator_without_memory_counters_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_allocation", lambda device: None)
    (row,) = check_counters(Machine.of([FIRST]))
    assert (row.verdict, row.result) == (Verdict.SKIPPED, "torch counts no memory on this device")


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ((SIZE, 0, SIZE), Verdict.OK),
        ((SIZE + 512, 0, SIZE + 512), Verdict.OK),
        ((0, 0, 0), Verdict.PROBLEM),
        ((SIZE, SIZE, SIZE), Verdict.PROBLEM),
        ((SIZE, 0, 0), Verdict.PROBLEM),
    ],
)
def test_counters_that_do_not_follow_an_allocation_are_a_problem(
    counts: tuple[int, int, int], verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "count_allocation", lambda device: counts)
    (row,) = check_counters(Machine.of([FIRST]))
    assert row.verdict is verdict and row.name == "memory counters of cuda:0"
    assert ("estimates of gpipe profile" in row.to_do) == (verdict is Verdict.PROBLEM)
    assert judge_counters(FIRST, *counts) == row


@pytest.fixture
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "LARGE", 2**16)


@pytest.mark.usefixtures("small_copies")
def test_a_copy_is_timed_and_compared() -> None:
    link = measure_link(CPU, CPU)
    assert link.gb_per_second > 0 and link.latency_us > 0 and link.intact and link.peer_access is None


@pytest.mark.usefixtures("small_copies")
def test_a_copy_that_changes_a_byte_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(work: object, on: object, **options: object) -> float:
        return 1.0  # the copy never runs

    monkeypatch.setattr(devices, "median_seconds", broken)
    (row,) = check_links(Machine.of([CPU]))
    assert row.verdict is Verdict.PROBLEM and "from cpu to cpu arrive changed" in row.to_do


@pytest.mark.usefixtures("small_copies")
def test_workers_on_a_cpu_need_no_copies() -> None:
    (row,) = check_links(Machine.of([CPU, CPU]))
    assert row.verdict is Verdict.OK and "without a copy" in row.result
    assert row.figures["links"][0].keys() == {
        "source",
        "destination",
        "latency_us",
        "gb_per_second",
        "intact",
        "peer_access",
        "pinned",
    }


def test_a_fast_link_is_fine() -> None:
    row = judge_pairs(FIRST, [DIRECT], HOST)
    assert (row.name, row.verdict, row.to_do) == ("links from cuda:0", Verdict.OK, "")
    assert row.result == "to cuda:1 24.0 GB/s, 9 us"


@pytest.mark.parametrize("slow", [replace(DIRECT, gb_per_second=9.0), replace(DIRECT, peer_access=False)])
def test_a_link_through_the_host_is_a_note_with_a_cure(slow: Link) -> None:
    row = judge_pairs(FIRST, [DIRECT, slow], HOST)
    assert row.verdict is Verdict.NOTE and "through the host" in row.to_do
    assert ("without peer access" in row.result) == (slow.peer_access is False)


def test_a_link_that_changes_bytes_is_a_problem_that_names_it() -> None:
    row = judge_pairs(FIRST, [DIRECT, replace(DIRECT, intact=False)], HOST)
    assert row.verdict is Verdict.PROBLEM and "from cuda:0 to cuda:1 arrive changed" in row.to_do


@pytest.mark.parametrize(
    ("link", "verdict", "cure"),
    [
        (UPLOAD, Verdict.OK, ""),
        (replace(UPLOAD, gb_per_second=0.8), Verdict.NOTE, "PCIe generation and lanes"),
        (replace(UPLOAD, intact=False), Verdict.PROBLEM, "from cpu to cuda:0 arrive changed"),
    ],
)
def test_the_links_with_the_host_are_judged(link: Link, verdict: Verdict, cure: str) -> None:
    pageable = replace(UPLOAD, pinned=False, gb_per_second=2.0)
    row = judge_host_links(FIRST, [link, pageable])
    assert row.verdict is verdict and cure in row.to_do and "to it pageable 2.0 GB/s" in row.result


def test_a_device_that_reads_no_pinned_memory_is_judged_by_pageable_copies() -> None:
    pageable = replace(UPLOAD, pinned=False)
    assert judge_host_links(FIRST, [pageable]).verdict is Verdict.OK
    assert judge_host_links(FIRST, [replace(pageable, gb_per_second=2.0)]).verdict is Verdict.NOTE


@pytest.mark.parametrize(("count", "pairs"), [(1, 0), (2, 2), (4, 12), (8, 56), (9, 18), (16, 32)])
def test_of_many_devices_only_neighbors_are_measured(count: int, pairs: int) -> None:
    present = [torch.device("cuda", index) for index in range(count)]
    assert len(list(pairs_to_measure(present))) == pairs
