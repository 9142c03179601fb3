from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.errors import DataError, GpipeError, PeerError, PeerRaised
from gpipe_cli.launch.rank_files import ExitReport
from gpipe_cli.launch.rank_states import RankExit, root_cause


def ended(rank: int, died: float, code: int | None = None, *, peer: bool = False, **more: Any) -> RankExit:
    report = None if code is None else ExitReport(code, f"error {code}", peer, died - 0.1)
    return RankExit(rank, f"partition {rank}", died_at=died, report=report, **more)


def test_ranks_that_all_finished_have_no_root_cause() -> None:
    assert root_cause([ended(0, 1, 0), ended(1, 2, 0)]) is None


@pytest.mark.parametrize(
    ("exits", "kind", "message"),
    [
        ([ended(0, 2, 7, peer=True), ended(1, 3, 3)], DataError, "rank 1 (partition 1): error 3"),
        ([ended(0, 2, 1), ended(1, 3, 3)], PeerRaised, "rank 0 (partition 0): error 1"),
        ([ended(0, 2, 7, peer=True), ended(1, 3, 7, peer=True)], PeerError, "rank 0 (partition 0): error 7"),
        (
            [ended(0, 1, 7, peer=True), ended(1, 2, signal=signal.SIGSEGV)],
            PeerError,
            "rank 1 (partition 1) was killed by SIGSEGV",
        ),
        (
            [ended(0, 3, signal=signal.SIGTERM), ended(1, 2, signal=signal.SIGKILL)],
            PeerError,
            "rank 1 (partition 1) was killed by SIGKILL, perhaps because memory ran out",
        ),
        ([ended(0, 3, 0), ended(1, 2)], PeerError, "rank 1 (partition 1) exited without a report"),
    ],
)
def test_the_first_rank_that_failed_on_its_own_is_named(
    exits: list[RankExit], kind: type[GpipeError], message: str
) -> None:
    error = root_cause(exits)
    assert type(error) is kind and str(error) == message
    assert str(root_cause(exits[::-1])) == message


@given(st.integers(1, 6), st.data())
def test_a_rank_that_lost_its_peer_is_never_named_before_that_peer(ranks: int, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(0, ranks))
    times = data.draw(st.lists(st.floats(0, 9), min_size=ranks + 1, max_size=ranks + 1))
    exits = [
        ended(rank, time, 6 if rank == guilty else 7, peer=rank != guilty) for rank, time in enumerate(times)
    ]
    assert str(root_cause(exits)).startswith(f"rank {guilty} ")
