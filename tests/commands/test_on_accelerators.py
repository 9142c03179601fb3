"""Commands that run and measure a model, on the accelerators of this machine or on simulated ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.command_line import Gpipe
from tests.support.run_files import weights

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_devices_give_the_bits_of_one_from_pinned_batches(
    tiny: Gpipe, accelerators: list[torch.device], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    pinned: list[int] = []
    pin_memory = torch.Tensor.pin_memory

    def count(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(len(tensor))
        return pin_memory(tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", count)
    words = ("deterministic=true", f"data.workers={workers}", "epochs=1", "log.every=3", "--json")
    one = tiny("train", f"devices=[{accelerators[0]}]", "engine=single", *words).json
    assert len(pinned) >= 2 * one["steps"], "input and target of every step"
    two = tiny("train", "devices=2", *words).json
    expected, actual = weights(one["run_dir"]), weights(two["run_dir"])
    assert two["loss"] == one["loss"]
    assert all(torch.equal(expected[name], actual[name]) for name in expected | actual)
    evaluated = tiny("eval", f"run={two['run_dir']}", "allow=[tiny_for_tests]", "--json")
    assert evaluated.json["loss"] == two["loss"], evaluated.err


def test_the_measured_memory_of_each_device_is_in_summary_and_report(
    tiny: Gpipe, accelerators: list[torch.device]
) -> None:
    words = ("schedule=interleaved", "partitions=4", "devices=2", "epochs=1")
    answer = tiny("train", *words, "--json").json
    rows = answer["partitions"]
    assert [row["device"] for row in rows] == [str(accelerators[index % 2]) for index in range(4)]
    assert all(row["device_peak_bytes"] > row["estimated_bytes"] >= 0 for row in rows)
    assert rows[0]["device_peak_bytes"] == rows[2]["device_peak_bytes"], "partitions of one device share it"
    page = (Path(answer["run_dir"]) / "report.html").read_text()
    assert "measured peak of the whole device" in page
    assert "measured on the device" in tiny("train", *words).out


def test_a_profile_times_copies_and_measures_memory(tiny: Gpipe, accelerators: list[torch.device]) -> None:
    summary = tiny("profile", "devices=2", "timeline=true", "seconds=0", "--json").json
    for row in summary["timeline"]["partitions"]:
        assert row["device_peak_bytes"] > row["estimated_bytes"] / 2 > 0
    trace = json.loads((Path(summary["run_dir"]) / "trace.json").read_text())
    copies = [event for event in trace["traceEvents"] if event.get("cat") == "copy" and event["pid"] == 1]
    assert copies and all(event["dur"] > 0 for event in copies)


def test_a_balance_by_time_is_measured(tiny: Gpipe, accelerators: list[torch.device]) -> None:
    answer = tiny("balance", "--by", "time", "devices=2", "--json").json
    assert len(answer["balance"]) == 2 and all(cost > 0 for cost in answer["costs"])


@pytest.mark.slow
def test_a_plan_for_several_devices_was_refused_because_targets_were_on_the_first(
    gpipe: Gpipe, accelerators: list[torch.device]
) -> None:
    fixed = ("devices=2", "partitions=2", "chunks=4", "plan.budget=5", "top=3", "verify=true")
    answer = gpipe("plan", "model=mlp", "model.width=16", "batch_size=16", *fixed, "--json")
    assert answer.code == 0, answer.err
    plans = answer.json["candidates"]
    # Plans have balances of their own, and take turns with the same layers.
    assert len(plans) == 3 and all(plan["measured_ms"] > 0 for plan in plans)


def test_devices_that_differ_are_measured_each_by_itself_and_named_in_the_command(
    gpipe: Gpipe, accelerators: list[torch.device]
) -> None:
    devices = f"devices=[{accelerators[0]},cpu]"
    fixed = (devices, "partitions=2", "chunks=2", "schedule=1f1b", "checkpoint=never", "plan.cache=false")
    answer = gpipe("plan", "model=mlp", "model.width=16", "batch_size=16", *fixed, "verify=true", "--json")
    assert answer.code == 0, answer.err
    best = answer.json["best"]
    assert sum(best["balance"]) == 5 and best["devices"] == 2 and best["measured_ms"] > 0
    assert answer.json["paste"].endswith(f"'{devices}'")


def test_the_environment_names_the_devices(gpipe: Gpipe, accelerators: list[torch.device]) -> None:
    facts = gpipe("env", "--json").json
    assert facts["accelerator"] == accelerators[0].type and len(facts["devices"]) == len(accelerators)
