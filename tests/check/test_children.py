"""Checks that run in processes of their own: ranks, and the sanitizer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.check import children
from gpipe_cli.check.children import (
    check_races,
    check_ranks,
    exchange_tensors,
    judge_exchange,
    judge_races,
    run_in_children,
)
from gpipe_cli.check.row import Check, Machine, Verdict
from gpipe_cli.errors import Interrupted, PeerError
from gpipe_cli.launch.launcher import Attempt

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FIGURES = {"backend": "nccl", "intact": True, "all_reduce_ms": 0.31, "send_gb_per_second": 20.5}


def children_of_checks() -> list[str]:
    """The living ones: the command line of a dead process is empty."""
    ids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [child for child in ids if b"run_as_child" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_two_ranks_on_a_cpu_exchange_tensors_and_are_gone_afterwards(
    capfd: pytest.CaptureFixture[str],
) -> None:
    (row,) = check_ranks(Machine.of([CPU]))
    assert row.verdict is Verdict.OK, row
    assert row.result.startswith("2 ranks with gloo: a sum takes ") and row.figures["intact"] is True
    assert children_of_checks() == []
    assert capfd.readouterr().out == ""


def failing(error: BaseException) -> Any:
    def run(*arguments: object) -> Mapping[str, Any]:
        raise error

    return run


@pytest.mark.parametrize(("devices", "nccl"), [([CPU], False), ([GPU, torch.device("cuda", 1)], True)])
def test_a_rank_that_does_not_answer_is_a_problem_with_a_hint(
    devices: Sequence[torch.device], nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "backends_for", lambda device: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(children, "run_in_children", failing(PeerError("rank 1 (cuda:1): no answer")))
    (row,) = check_ranks(Machine.of(devices))
    assert (row.verdict, row.result) == (Verdict.PROBLEM, "rank 1 (cuda:1): no answer")
    assert "engine=processes will fail" in row.to_do and ("NCCL_DEBUG=INFO" in row.to_do) == nccl


def test_a_build_without_nccl_is_a_note() -> None:
    if torch.distributed.is_nccl_available():
        pytest.skip("this build has NCCL")
    (row,) = check_ranks(Machine.of([GPU, torch.device("cuda", 1)]))
    assert (
        row.verdict is Verdict.NOTE
        and "needs the backend nccl, which this build of torch does not" in row.result
    )
    assert row.to_do.startswith("engine=processes cannot be used: use engine=threads")


def test_values_that_arrive_changed_are_a_problem() -> None:
    assert judge_exchange(2, FIGURES).result == (
        "2 ranks with nccl: a sum takes 0.3 ms for 16 MiB, a ring of sends 20.5 GB/s"
    )
    assert judge_exchange(2, {**FIGURES, "intact": False}).verdict is Verdict.PROBLEM


def test_ctrl_c_while_children_run_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = Attempt(Interrupted("stopped at once"), None, None)
    monkeypatch.setattr(children, "run_ranks", lambda *arguments: interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_in_children(exchange_tensors, [CPU])


@pytest.mark.parametrize("check", [check_ranks, check_races])
def test_a_system_without_supervision_skips_the_check(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "can_start_children", lambda: False)
    monkeypatch.setattr(children, "offers_sanitizer", lambda device: True)
    (row,) = check(Machine.of([GPU, torch.device("cuda", 1)]))
    assert row.verdict is Verdict.SKIPPED and "on Linux only" in row.result


@pytest.mark.parametrize(
    ("check", "device", "result"),
    [
        (check_ranks, GPU, "needs a second accelerator beside cuda:0"),
        (check_races, CPU, "torch offers its sanitizer only for GPUs, in builds for CUDA and ROCm"),
    ],
)
def test_what_a_machine_does_not_offer_is_skipped(check: Check, device: torch.device, result: str) -> None:
    (row,) = check(Machine.of([device]))
    assert (row.verdict, row.result) == (Verdict.SKIPPED, result)


@pytest.mark.parametrize(
    ("finds", "found", "verdict", "result"),
    [
        (True, [], Verdict.OK, "reports none in copies and in a pipeline"),
        (True, ["Access by stream 1"], Verdict.PROBLEM, "reports 1 on cuda:0: Access by stream 1"),
        (False, [], Verdict.NOTE, "its silence proves nothing"),
    ],
)
def test_the_report_of_the_sanitizer_is_judged(
    finds: bool, found: list[str], verdict: Verdict, result: str
) -> None:
    row = judge_races(GPU, {"finds_deliberate_race": finds, "races": found})
    assert row.verdict is verdict and result in row.result and bool(row.to_do) == (verdict is not Verdict.OK)


@pytest.mark.slow
def test_children_that_hang_are_ended_and_named() -> None:
    with pytest.raises(PeerError, match=r"rank 0 \(cpu\).*within step_timeout=0.01 seconds"):
        run_in_children(exchange_tensors, [CPU, CPU], timeout=0.01)
    assert children_of_checks() == []
