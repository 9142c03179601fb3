"""Resuming with more epochs says what happens to the learning rate, and how to keep it."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.runs.resume import longer_line, lr_line
from gpipe_cli.training.loop import TrainSpec
from gpipe_cli.training.lr_schedules import Constant, Cosine, OneCycle
from tests.support.command_line import Gpipe

SCHEDULES = "gpipe_cli.training.lr_schedules"


def line(name: str, schedule: Any, steps: int, step: int, overrides: list[str]) -> str | None:
    node = {"_target_": f"{SCHEDULES}.{name}"}
    saved = OmegaConf.create({"epochs": 3, "steps": None, "optimizer": {"lr": 0.1}, "lr_schedule": node})
    spec = TrainSpec(steps=steps, steps_per_epoch=10, lr=0.1, lr_schedule=schedule, seed=0)
    return lr_line(saved, TrainConfig(lr_schedule=node, optimizer={"lr": 0.1}), spec, step, overrides)


def test_a_stretched_schedule_is_announced_with_the_way_to_keep_the_rate() -> None:
    said = line("OneCycle", OneCycle(), 60, 30, ["epochs=6"])
    assert said is not None and said.startswith(
        "learning rate: one_cycle now spans 60 steps instead of 30, so it goes from 1e-05 to 0.0"
    )
    assert said.endswith("to keep the last rate instead, add lr_schedule=constant optimizer.lr=1e-05")


def test_another_key_of_the_optimizer_does_not_explain_another_rate() -> None:
    said = line("OneCycle", OneCycle(), 60, 30, ["epochs=6", "optimizer.weight_decay=0"])
    assert said == line("OneCycle", OneCycle(), 60, 30, ["epochs=6"])


def test_nothing_is_said_where_the_rate_stays_as_planned() -> None:
    assert line("OneCycle", OneCycle(), 30, 20, []) is None
    assert line("Constant", Constant(), 60, 30, ["epochs=6"]) is None
    assert line("Cosine", Cosine(), 60, 0, ["epochs=6"]) is None


def test_who_gives_another_rate_is_told_its_values_only() -> None:
    said = line("OneCycle", Constant(), 60, 30, ["lr_schedule=constant"])
    assert said == "learning rate: it goes from 1e-05 to 0.1 and ends at 0.1"


def test_a_saved_configuration_that_cannot_be_read_is_no_reason_to_fail() -> None:
    spec = TrainSpec(steps=60, steps_per_epoch=10, lr=0.1, lr_schedule=Constant(), seed=0)
    for saved in ({}, {"epochs": 3, "optimizer": {"lr": 0.1}, "lr_schedule": {"_target_": "os.system"}}):
        assert lr_line(OmegaConf.create(saved), TrainConfig(), spec, 30, []) is None


@pytest.mark.parametrize("name", ["OneCycle", "Constant"])
def test_the_summary_says_what_training_longer_does(name: str) -> None:
    settings = TrainConfig(lr_schedule={"_target_": f"{SCHEDULES}.{name}"}, optimizer={"lr": 0.1})
    said = longer_line(settings, 30, 60)
    assert (said is None) == (name == "Constant")
    assert said is None or said.startswith("then goes from 1e-05 to 0.0")


def test_a_resumed_run_prints_it(tiny: Gpipe) -> None:
    first = tiny("train", "epochs=1", "run_dir=run")
    assert "learning_rate" in first.out and "add lr_schedule=constant optimizer.lr=2e-07" in first.out
    answer = tiny("train", "resume=run", "epochs=2")
    assert answer.code == 0
    assert "learning rate: one_cycle now spans 8 steps instead of 4, so it goes from 2e-07 to " in answer.err
