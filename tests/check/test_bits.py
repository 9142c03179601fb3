from __future__ import annotations

import pytest
import torch

from gpipe_cli.check import bits
from gpipe_cli.check.bits import CPU, Difference, check_bits, differences, judge_against_cpu, judge_schedule
from gpipe_cli.check.row import Machine, Verdict
from gpipe_cli.schedule import names

MACHINE = Machine.of([CPU, CPU])
EXPECTED = {"loss": torch.tensor(2.0), "gradient of 0.weight": torch.tensor([1.0, -4.0])}


def test_every_schedule_gives_the_bits_of_one_device_in_every_checkpoint_mode() -> None:
    rows = list(check_bits(MACHINE))
    assert [row.name for row in rows] == [f"bits of schedule={schedule}" for schedule in (*names(), "auto")]
    assert [row.verdict for row in rows] == [Verdict.OK] * len(rows), rows
    assert all("always, except_last, never" in row.result and row.figures["tensors"] > 20 for row in rows)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_pipeline_with_other_bits_is_a_problem_that_names_modes_and_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_pipelined(workers: object, blocks: int, schedule: str, checkpoint: str) -> bits.Results:
        results = bits.run_alone(CPU, bits.small_model(blocks, dropout=bits.DROPOUT))
        if schedule == "1f1b" and checkpoint != "never":
            results["gradient of 1.bias"][3] += 1e-6
        return results

    monkeypatch.setattr(bits, "_run_pipelined", run_pipelined)
    wrong, *rows = check_bits(MACHINE)
    assert wrong.name == "bits of schedule=1f1b" and wrong.verdict is Verdict.PROBLEM
    assert wrong.result.startswith("checkpoint=always, except_last: 1 of ")
    assert "the first gradient of 1.bias by " in wrong.result and "open an issue" in wrong.to_do
    assert wrong.figures["differing"].keys() == {"always", "except_last"}
    assert {row.verdict for row in rows} == {Verdict.OK}


def test_devices_of_two_kinds_may_round_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "device_name", lambda device: f"kind {device.index}")
    machine = Machine.of([torch.device("cuda", 0), torch.device("cuda", 1)])
    row = judge_schedule(machine, "gpipe", EXPECTED, {"never": [Difference("loss", float("inf"))]})
    assert row.verdict is Verdict.NOTE
    assert row.figures["differing"] == {"never": {"loss": None}}, "infinity is no number in JSON"
    assert row.to_do == "kind 0 and kind 1 round differently; name devices of one kind"


def test_every_tensor_that_differs_is_listed_with_its_relative_difference() -> None:
    results = {"loss": torch.tensor(2.0), "gradient of 0.weight": torch.tensor([1.0, -3.0])}
    assert differences(EXPECTED, EXPECTED) == []
    assert differences(EXPECTED, results) == [Difference("gradient of 0.weight", 0.25)]
    (missing,) = differences(EXPECTED, {"loss": torch.tensor(2.0)})
    assert str(missing) == "gradient of 0.weight, which is missing or not finite"
    (not_a_number,) = differences(EXPECTED, {**EXPECTED, "loss": torch.tensor(float("nan"))})
    assert not_a_number.relative == float("inf")


@pytest.mark.parametrize(
    ("found", "verdict", "result"),
    [
        ([], Verdict.OK, "bitwise identical"),
        ([Difference("loss", 1e-6)], Verdict.OK, "equal but for rounding; the most differs loss by 1.0e-06"),
        ([Difference("a", 1e-6), Difference("loss", 0.5)], Verdict.PROBLEM, "differ: loss by 5.0e-01"),
        ([Difference("loss", float("inf"))], Verdict.PROBLEM, "differ: loss, which is missing"),
    ],
)
def test_the_cpu_may_differ_by_rounding_only(found: list[Difference], verdict: Verdict, result: str) -> None:
    row = judge_against_cpu(torch.device("cuda", 0), found)
    assert row.verdict is verdict and row.result.startswith(result)
    assert ("vendor's memory test" in row.to_do) == (verdict is Verdict.PROBLEM)
