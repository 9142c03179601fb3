"""The checks on the accelerators of this machine, or on simulated ones, where they must be free of stream races.

Figures of time decide nothing: simulated devices are as slow as the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpipe_cli.check import hardware, speed
from gpipe_cli.check.bits import check_bits
from gpipe_cli.check.hardware import check_counters, check_devices, check_links
from gpipe_cli.check.row import Machine, Verdict
from gpipe_cli.check.speed import check_overlap, check_speed
from tests.support.command_line import Gpipe

pytestmark = pytest.mark.accelerator


@pytest.fixture
def machine(accelerators: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(hardware, "LARGE", 2**20)
    monkeypatch.setattr(speed, "COPIED", 2**20)
    monkeypatch.setattr(speed, "WIDTHS", (64,))
    return Machine.of(accelerators)


@pytest.mark.parametrize("check", [check_devices, check_counters])
def test_every_device_is_described_and_counts_its_memory(check: Any, machine: Machine) -> None:
    rows = list(check(machine))
    assert [row.name.split()[-1] for row in rows] == [str(device) for device in machine.devices]
    assert {row.verdict for row in rows} <= {Verdict.OK, Verdict.NOTE}, rows


@pytest.mark.slow
def test_every_schedule_gives_the_bits_of_one_device(machine: Machine) -> None:
    *schedules, against_cpu = check_bits(Machine.of(machine.devices[:2]))
    assert [row.verdict for row in schedules] == [Verdict.OK] * 5, schedules
    assert against_cpu.verdict is Verdict.OK, against_cpu


@pytest.mark.slow
def test_every_device_can_have_a_partition(machine: Machine) -> None:
    rows = list(check_bits(machine))
    assert {row.verdict for row in rows} == {Verdict.OK}, rows


@pytest.mark.slow
def test_two_workers_may_share_a_device(machine: Machine) -> None:
    rows = list(check_bits(Machine.of(machine.devices[:1])))
    assert {row.verdict for row in rows} == {Verdict.OK}, rows


def test_copies_arrive_unchanged_over_every_link(machine: Machine) -> None:
    rows = list(check_links(machine))
    measured = [link for row in rows for link in row.figures["links"]]
    count = len(machine.devices)
    assert len(measured) == 4 * count + len(list(hardware.pairs_to_measure(machine.devices)))
    assert all(link["intact"] and link["gb_per_second"] > 0 and link["latency_us"] > 0 for link in measured)
    assert Verdict.PROBLEM not in {row.verdict for row in rows}


def test_overlap_and_speed_up_are_measured(machine: Machine) -> None:
    rows = [*check_overlap(machine), *check_speed(machine)]
    assert {row.verdict for row in rows} <= {Verdict.OK, Verdict.NOTE, Verdict.SKIPPED}, rows
    assert len(machine.devices) < speed.PARTITIONS or rows[-1].figures["speed_up"] > 0


def test_memory_that_runs_out_is_a_row_and_the_rest_still_runs(
    simulated: Any, machine: Machine, gpipe: Gpipe
) -> None:
    with simulated.memory_limit(2**18):
        answer = gpipe("check", "--json")
    rows = {row["name"]: row for row in answer.json["rows"]}
    assert answer.code == 1 and rows["links"]["verdict"] == "problem"
    assert "out of memory" in rows["links"]["result"] and "end other processes" in rows["links"]["to_do"]
    assert "ranks" in rows
