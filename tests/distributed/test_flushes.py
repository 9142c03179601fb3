from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.distributed.flushes import Flush, flushes
from gpipe_cli.pipeline.microbatch import micro_batches

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


@given(st.sampled_from(SCHEDULES), st.integers(1, 40), st.integers(1, 20), st.integers(1, 8))
def test_flushes_cover_the_micro_batches_in_order_and_are_what_torch_takes(
    schedule: str, rows: int, chunks: int, ranks: int
) -> None:
    sizes = [piece.size for piece in micro_batches(rows, chunks)]
    found = list(flushes(sizes, schedule, ranks))
    covered = [index for flush in found for index in range(flush.first, flush.first + flush.count)]
    assert covered == list(range(len(sizes)))
    for flush in found:
        assert len({sizes[flush.first + index] for index in range(flush.count)}) == 1
        if flush.schedule == "1f1b":
            assert flush.count >= ranks
        elif flush.schedule != "gpipe":
            assert flush.count % max(1, flush.count // ranks) == 0


@given(st.sampled_from(SCHEDULES), st.integers(1, 8), st.integers(1, 8))
def test_an_even_batch_of_as_many_rounds_as_ranks_is_one_flush(
    schedule: str, ranks: int, rounds: int
) -> None:
    assert list(flushes([2] * ranks * rounds, schedule, ranks)) == [Flush(schedule, 0, ranks * rounds)]


@pytest.mark.parametrize(
    ("sizes", "schedule", "expected"),
    [
        ([3, 3, 2, 2], "1f1b", [("1f1b", 0, 2), ("1f1b", 2, 2)]),
        ([3, 3, 2], "1f1b", [("1f1b", 0, 2), ("gpipe", 2, 1)]),
        ([1] * 7, "interleaved", [("interleaved", 0, 6), ("interleaved", 6, 1)]),
    ],
)
def test_uneven_batches_on_two_ranks(
    sizes: list[int], schedule: str, expected: list[tuple[str, int, int]]
) -> None:
    assert list(flushes(sizes, schedule, 2)) == [Flush(*one) for one in expected]
