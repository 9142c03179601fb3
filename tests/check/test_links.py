from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpipe_cli.check import links
from gpipe_cli.check.links import (
    CPU,
    Link,
    check_links,
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


@pytest.fixture
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LARGE", 2**16)


@pytest.mark.usefixtures("small_copies")
def test_a_copy_is_timed_and_compared() -> None:
    link = measure_link(CPU, CPU)
    assert link.gb_per_second > 0 and link.latency_us > 0 and link.intact and link.peer_access is None


@pytest.mark.usefixtures("small_copies")
def test_a_copy_that_changes_a_byte_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(work: object, devices: object, **options: object) -> float:
        return 1.0  # the copy never runs

    monkeypatch.setattr(links, "median_seconds", broken)
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
    devices = [torch.device("cuda", index) for index in range(count)]
    assert len(list(pairs_to_measure(devices))) == pairs
