from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.config.checks import check
from gpipe_cli.config.schema import (
    COMPONENT_GROUPS,
    EvalConfig,
    LogConfig,
    ScheduleConfig,
    SnapshotConfig,
    TrainConfig,
)
from gpipe_cli.errors import ConfigError

CHOSEN: dict[str, Any] = {group: {"_target_": "a.b"} for group in COMPONENT_GROUPS}
TRAIN = TrainConfig(**{**CHOSEN, "optimizer": {"_target_": "a.b", "lr": 0.1}})
EVAL = EvalConfig(
    **{group: node for group, node in CHOSEN.items() if group in EvalConfig.__dataclass_fields__}, run="."
)


def test_the_defaults_pass() -> None:
    check(TRAIN)
    check(EVAL)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chunks": 0}, "chunks=0: must be at least 1"),
        ({"eval_chunks": 0}, "eval_chunks=0: must be at least 1"),
        ({"partitions": 0}, "partitions=0: must be at least 1"),
        ({"log": LogConfig(every=0)}, "log.every=0: must be at least 1"),
        (
            {"log": LogConfig(console=True)},
            "log.console=true: prints the lines of log.layers and log.partitions; set one of them to true",
        ),
        ({"seed": 2**63}, f"seed={2**63}: must be at most {2**63 - 1}"),
        ({"step_timeout": 0.0}, "step_timeout=0.0: must be positive, or null for none"),
        ({"clip_grad_norm": math.nan}, "clip_grad_norm=nan: must be positive"),
        ({"threads": True}, "threads=True: must be auto or a whole number of at least 1"),
        ({"threads": 0}, "threads=0: must be auto"),
        ({"threads": {"a": 1}}, "threads={'a': 1}: must be auto"),
        ({"checkpoint": {"a": 1}}, "checkpoint={'a': 1}: choose one of: always, except_last, never"),
        ({"checkpoint": None}, "checkpoint=None: choose one of: always, except_last, never"),
        ({"device_memory": {"a": 1}}, "device_memory={'a': 1}: expected a number of bytes"),
        ({"snapshot": SnapshotConfig(every={"a": 1})}, "snapshot.every={'a': 1}: must be a number of steps"),
        ({"precision": "fp23"}, "precision=fp23: did you mean 'fp32'"),
        ({"checkpoint": "alway"}, "checkpoint=alway: did you mean 'always'"),
        ({"checkpoint": ["always", "nevr"]}, r"checkpoint=\['always', 'nevr'\]: did you mean 'never'"),
        ({"checkpoint": 3}, "checkpoint=3: choose one of: always, except_last, never"),
        ({"schedule": ScheduleConfig(name="gpip")}, "schedule.name=gpip: did you mean 'gpipe'"),
        ({"devices": "cpu"}, "devices=cpu: must be auto, a number of devices or a list"),
        ({"devices": True}, "devices=True: must be auto"),
        ({"devices": [1.5]}, r"devices=\[1.5\]: expected a list of names or numbers"),
        ({"devices": [True]}, r"devices=\[True\]: expected a list of names or numbers"),
        (
            {"devices": 3, "partitions": 2},
            "partitions=2: each partition needs its own device, but devices=3 gives 3",
        ),
        (
            {"devices": ["cpu"] * 3, "partitions": 2, "schedule": ScheduleConfig("interleaved")},
            "partitions=2: .* devices=.* gives 3",
        ),
        ({"balance": {"_target_": "a.b", "layers": [2, 0]}}, r"balance.layers=\[2, 0\]: every entry"),
        ({"balance": {"_target_": "a.b", "layers": [2, True]}}, r"balance.layers=\[2, True\]: every entry"),
        ({"model": {}}, "model: nothing chosen; give model=<option>, see `gpipe train --help`"),
        ({"model": {"_target_": "a.b", "num_classes": 0}}, "model.num_classes=0: must be at least 1"),
        ({"optimizer": {"_target_": "a.b"}}, "optimizer.lr: must be given"),
        (
            {"optimizer": {"_target_": "a.b", "lr": 0.1, "betas": [0.9, math.inf]}},
            r"optimizer.betas\[1\]=inf",
        ),
    ],
)
def test_every_problem_is_named_with_its_key_and_value(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(replace(TRAIN, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"devices": 2, "partitions": 2},
        {"devices": ["cpu", 0]},
        {"devices": 2, "partitions": 4, "schedule": ScheduleConfig("interleaved")},
        {"threads": 3, "step_timeout": 0.5, "clip_grad_norm": 1.0},
        {"balance": {"_target_": "a.b", "layers": [2, 3]}, "partitions": 2},
        {"model": {"_target_": "a.b", "num_classes": None}},
    ],
)
def test_what_is_right_passes(change: dict[str, Any]) -> None:
    check(replace(TRAIN, **change))


@given(st.integers(-5, 0), st.integers(-5, 0), st.sampled_from(["fp8", "half"]))
def test_all_problems_are_told_at_once(chunks: int, steps: int, precision: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(replace(TRAIN, chunks=chunks, steps=steps, precision=precision))
    for problem in (f"chunks={chunks}: ", f"steps={steps}: ", f"precision={precision}: "):
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"run": None}, "run: give the run to evaluate"),
        ({"split": "tset"}, "split=tset: did you mean 'test'"),
    ],
)
def test_an_evaluation_has_problems_of_its_own(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(replace(EVAL, **change))
