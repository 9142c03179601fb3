from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.engines.blame import End, failure
from gpipe_cli.engines.meeting import LastWord
from gpipe_cli.errors import DataError, GpipeError, PeerError, PeerRaised


def end(rank: int, died: float, code: int | None = None, *, peer: bool = False, **more: Any) -> End:
    word = None if code is None else LastWord(code, f"error {code}", peer, died - 0.1)
    return End(rank, f"partition {rank}", died=died, word=word, **more)


def test_without_a_failure_nobody_is_blamed() -> None:
    assert failure([end(0, 1, 0), end(1, 2, 0)]) is None


@pytest.mark.parametrize(
    ("ends", "kind", "says"),
    [
        ([end(0, 2, 7, peer=True), end(1, 3, 3)], DataError, "rank 1 (partition 1): error 3"),
        ([end(0, 2, 1), end(1, 3, 3)], PeerRaised, "rank 0 (partition 0): error 1"),
        ([end(0, 2, 7, peer=True), end(1, 3, 7, peer=True)], PeerError, "rank 0 (partition 0): error 7"),
        (
            [end(0, 1, 7, peer=True), end(1, 2, signal=signal.SIGSEGV)],
            PeerError,
            "rank 1 (partition 1) was killed by SIGSEGV",
        ),
        (
            [end(0, 3, signal=signal.SIGTERM), end(1, 2, signal=signal.SIGKILL)],
            PeerError,
            "rank 1 (partition 1) was killed by SIGKILL, perhaps because memory ran out",
        ),
        ([end(0, 3, 0), end(1, 2)], PeerError, "rank 1 (partition 1) ended without a word"),
    ],
)
def test_the_first_that_failed_by_itself_is_blamed(
    ends: list[End], kind: type[GpipeError], says: str
) -> None:
    found = failure(ends)
    assert type(found) is kind and str(found) == says
    assert str(failure(ends[::-1])) == says


@given(st.integers(1, 6), st.data())
def test_a_rank_that_lost_its_peer_is_never_blamed_before_that_peer(ranks: int, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(0, ranks))
    times = data.draw(st.lists(st.floats(0, 9), min_size=ranks + 1, max_size=ranks + 1))
    ends = [
        end(rank, time, 6 if rank == guilty else 7, peer=rank != guilty) for rank, time in enumerate(times)
    ]
    assert str(failure(ends)).startswith(f"rank {guilty} ")
