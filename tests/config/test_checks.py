from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.config.checks import check
from gpipe_cli.config.schema import (
    COMPONENT_GROUPS,
    EvalConfig,
    ScheduleConfig,
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
