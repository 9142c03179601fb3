from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from gpipe_cli.distributed.torch_schedule import (
    Flush,
    TorchScheduleClass,
    check_placement,
    flushes,
    torch_schedule_class,
)
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.microbatch import micro_batches
from gpipe_cli.schedule import names
from tests.support.command_line import Gpipe

SCHEDULES = [torch_schedule_class(name) for name in names()]


@given(st.sampled_from(SCHEDULES), st.integers(1, 40), st.integers(1, 20), st.integers(1, 8))
def test_flushes_cover_the_micro_batches_in_order_and_are_what_torch_takes(
    schedule: TorchScheduleClass, rows: int, chunks: int, ranks: int
) -> None:
    sizes = [piece.size for piece in micro_batches(rows, chunks)]
    runs = list(flushes(sizes, schedule, ranks))
    covered = [index for flush in runs for index in range(flush.first, flush.first + flush.count)]
    assert covered == list(range(len(sizes)))
    for flush in runs:
        assert len({sizes[flush.first + index] for index in range(flush.count)}) == 1
        if flush.schedule is Schedule1F1B:
            assert flush.count >= ranks
        elif flush.schedule is not ScheduleGPipe:
            assert flush.count % max(1, flush.count // ranks) == 0


@given(st.sampled_from(SCHEDULES), st.integers(1, 8), st.integers(1, 8))
def test_an_even_batch_of_as_many_rounds_as_ranks_is_one_flush(
    schedule: TorchScheduleClass, ranks: int, rounds: int
) -> None:
    assert list(flushes([2] * ranks * rounds, schedule, ranks)) == [Flush(schedule, 0, ranks * rounds)]


@pytest.mark.parametrize(
    ("sizes", "schedule", "expected"),
    [
        ([3, 3, 2, 2], Schedule1F1B, [Flush(Schedule1F1B, 0, 2), Flush(Schedule1F1B, 2, 2)]),
        ([3, 3, 2], Schedule1F1B, [Flush(Schedule1F1B, 0, 2), Flush(ScheduleGPipe, 2, 1)]),
        (
            [1] * 7,
            ScheduleInterleaved1F1B,
            [Flush(ScheduleInterleaved1F1B, 0, 6), Flush(ScheduleInterleaved1F1B, 6, 1)],
        ),
    ],
)
def test_uneven_batches_on_two_ranks(
    sizes: list[int], schedule: TorchScheduleClass, expected: list[Flush]
) -> None:
    assert list(flushes(sizes, schedule, 2)) == expected


def test_a_schedule_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"schedule=by_slice: torch\.distributed\.pipelining has no such schedule"
    ):
        torch_schedule_class("by_slice")


@pytest.mark.parametrize(
    ("schedule", "partitions", "ranks", "problem"),
    [
        ("1f1b", 4, 2, "schedule=1f1b: 4 partitions for 2 processes; each runs one"),
        ("interleaved", 5, 2, "give a multiple of 2"),
        ("interleaved", 2, 1, "torch needs at least two processes"),
    ],
)
def test_partitions_that_torch_cannot_place_are_refused(
    schedule: str, partitions: int, ranks: int, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_placement(schedule, partitions, ranks)


@pytest.mark.parametrize(
    ("schedule", "partitions", "ranks"),
    [("gpipe", 1, 1), ("zero_bubble", 3, 3), ("interleaved", 6, 3), ("interleaved", 2, 2)],
)
def test_partitions_that_torch_can_place_are_accepted(schedule: str, partitions: int, ranks: int) -> None:
    check_placement(schedule, partitions, ranks)


def test_the_command_line_refuses_a_placement_before_a_process_is_started(gpipe: Gpipe) -> None:
    words = ("engine=processes", "devices=[cpu,cpu]", "partitions=3", "schedule=interleaved")
    answer = gpipe("train", *words, "model=mlp", "data=digits", "--dry-run")
    assert answer.code == 2
    assert "3 partitions for 2 processes; every process needs the same number" in answer.err
