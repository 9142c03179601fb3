from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest
import torch

from gpipe_cli.check import hardware
from gpipe_cli.check.hardware import (
    CPU,
    SIZE,
    CheckedLink,
    check_counters,
    check_devices,
    check_link,
    check_links,
    judge_host_links,
    judge_pairs,
    pairs_to_measure,
)
from gpipe_cli.check.row import Machine, Verdict

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
DIRECT = CheckedLink(FIRST, SECOND, latency_us=9.0, gb_per_second=24.0, peer_access=True)
HOST = {FIRST: 25.0, SECOND: 25.0}
UPLOAD = CheckedLink(CPU, FIRST, latency_us=12.0, gb_per_second=25.0, pinned=True)
PAGEABLE = replace(UPLOAD, pinned=False, gb_per_second=2.0)


@pytest.mark.parametrize(("cores", "verdict", "to_do"), [(2, Verdict.OK, ""), (1, Verdict.NOTE, "second")])
def test_a_cpu_is_described_by_its_cores_and_a_single_one_is_a_note(
    cores: int, verdict: Verdict, to_do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "available_cores", lambda: cores)
    (row,) = check_devices(Machine.of([CPU]))
    assert (row.name, row.verdict, bool(row.to_do)) == ("device cpu", verdict, bool(to_do))
    assert to_do in row.to_do
    assert row.figures["cores"] == cores and row.figures["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("capability", "free", "verdict", "result"),
    [
        ("8.0", 70, Verdict.OK, "A100, compute capability 8.0, 70.00 GiB of 80.00 GiB free"),
        ("8.0", 20, Verdict.NOTE, "A100, compute capability 8.0, 20.00 GiB of 80.00 GiB free"),
        (None, None, Verdict.OK, "A100, torch cannot count its memory"),
    ],
)
def test_an_accelerator_is_described_and_one_that_others_use_is_a_note(
    capability: str | None,
    free: int | None,
    verdict: Verdict,
    result: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = None if free is None else (free * 2**30, 80 * 2**30)
    monkeypatch.setattr(hardware, "device_name", lambda device: "A100")
    monkeypatch.setattr(hardware, "compute_capability", lambda device: capability)
    monkeypatch.setattr(hardware, "free_and_total_bytes", lambda device: sizes)
    (row,) = check_devices(Machine.of([FIRST]))
    assert (row.verdict, row.result) == (verdict, result)
    assert ("remove it from devices=[...]" in row.to_do) == (verdict is Verdict.NOTE)


@pytest.mark.parametrize(
    ("device", "counts", "verdict", "result"),
    [
        (CPU, None, Verdict.SKIPPED, "a CPU has none"),
        (FIRST, None, Verdict.SKIPPED, "torch counts no memory on this device"),
        (FIRST, (SIZE, 0, SIZE), Verdict.OK, "a tensor of 64.0"),
        (FIRST, (SIZE + 512, 0, SIZE + 512), Verdict.OK, "a tensor of 64.0"),
        (FIRST, (0, 0, 0), Verdict.PROBLEM, "a tensor of 64.0"),
        (FIRST, (SIZE, SIZE, SIZE), Verdict.PROBLEM, "a tensor of 64.0"),
        (FIRST, (SIZE, 0, 0), Verdict.PROBLEM, "a tensor of 64.0"),
    ],
)
def test_counters_that_do_not_follow_an_allocation_are_a_problem(
    device: torch.device,
    counts: tuple[int, int, int] | None,
    verdict: Verdict,
    result: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "count_allocation", lambda device: counts)
    (row,) = check_counters(Machine.of([device]))
    assert row.verdict is verdict and row.result.startswith(result), row
    assert row.name == ("memory counters" if device == CPU else "memory counters of cuda:0")
    assert ("estimates of gpipe profile" in row.to_do) == (verdict is Verdict.PROBLEM)


@pytest.fixture
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "LARGE", 2**16)


@pytest.mark.usefixtures("small_copies")
def test_a_copy_is_timed_and_one_that_changes_a_byte_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    link = check_link(CPU, CPU)
    assert link.gb_per_second > 0 and link.latency_us > 0 and link.intact and link.peer_access is None
    monkeypatch.setattr(hardware, "median_seconds", lambda work, on, **_: 1.0)  # the copy never runs
    (row,) = check_links(Machine.of([CPU]))
    assert row.verdict is Verdict.PROBLEM and "from cpu to cpu arrive changed" in row.to_do


@pytest.mark.usefixtures("small_copies")
def test_workers_on_a_cpu_need_no_copies() -> None:
    (row,) = check_links(Machine.of([CPU, CPU]))
    assert row.verdict is Verdict.OK and "without a copy" in row.result
    assert row.figures["links"][0].keys() == asdict(DIRECT).keys()


@pytest.mark.parametrize(
    ("link", "verdict", "to_do"),
    [
        (DIRECT, Verdict.OK, ""),
        (replace(DIRECT, gb_per_second=9.0), Verdict.NOTE, "through the host"),
        (replace(DIRECT, peer_access=False), Verdict.NOTE, "through the host"),
        (replace(DIRECT, intact=False), Verdict.PROBLEM, "from cuda:0 to cuda:1 arrive changed"),
    ],
)
def test_the_links_between_devices_are_judged_by_the_worst(
    link: CheckedLink, verdict: Verdict, to_do: str
) -> None:
    row = judge_pairs(FIRST, [DIRECT, link], HOST)
    assert (row.name, row.verdict, bool(row.to_do)) == ("links from cuda:0", verdict, bool(to_do))
    assert to_do in row.to_do and row.result.startswith("to cuda:1 24.0 GB/s, 9 us; to cuda:1 ")
    assert ("without peer access" in row.result) == (link.peer_access is False)


@pytest.mark.parametrize(
    ("links", "verdict", "to_do"),
    [
        ([UPLOAD, PAGEABLE], Verdict.OK, ""),
        ([replace(UPLOAD, gb_per_second=0.8), PAGEABLE], Verdict.NOTE, "PCIe generation and lanes"),
        ([replace(UPLOAD, intact=False), PAGEABLE], Verdict.PROBLEM, "from cpu to cuda:0 arrive changed"),
        # A device that reads no pinned memory is judged by its pageable copies.
        ([replace(PAGEABLE, gb_per_second=25.0)], Verdict.OK, ""),
        ([PAGEABLE], Verdict.NOTE, "PCIe generation and lanes"),
    ],
)
def test_the_links_with_the_host_are_judged(
    links: Sequence[CheckedLink], verdict: Verdict, to_do: str
) -> None:
    row = judge_host_links(FIRST, links)
    assert row.verdict is verdict and to_do in row.to_do and "to it pageable " in row.result


@pytest.mark.parametrize(("count", "pairs"), [(1, 0), (2, 2), (4, 12), (8, 56), (9, 18), (16, 32)])
def test_of_many_devices_only_neighbors_are_measured(count: int, pairs: int) -> None:
    present = [torch.device("cuda", index) for index in range(count)]
    assert len(list(pairs_to_measure(present))) == pairs
