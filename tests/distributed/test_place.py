from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpipe_cli.distributed.place import check_placement
from gpipe_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("schedule", "partitions", "ranks", "said"),
    [
        ("1f1b", 4, 2, "schedule=1f1b: 4 partitions for 2 processes; each runs one"),
        ("interleaved", 5, 2, "give a multiple of 2"),
        ("interleaved", 2, 1, "torch needs two processes"),
    ],
)
def test_partitions_that_torch_cannot_place_are_refused(
    schedule: str, partitions: int, ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_placement(schedule, partitions, ranks)


@pytest.mark.parametrize(
    ("schedule", "partitions", "ranks"),
    [("gpipe", 1, 1), ("zero_bubble", 3, 3), ("interleaved", 6, 3), ("interleaved", 2, 2)],
)
def test_others_are_not(schedule: str, partitions: int, ranks: int) -> None:
    check_placement(schedule, partitions, ranks)


def test_the_command_line_refuses_them_before_a_process_is_started(gpipe: Callable[..., Any]) -> None:
    words = ("engine=processes", "devices=[cpu,cpu]", "partitions=3", "schedule=interleaved")
    answer = gpipe("train", *words, "model=mlp", "data=digits", "--dry-run")
    assert answer.code == 2
    assert "3 partitions for 2 processes; each must get as many as the others" in answer.err
