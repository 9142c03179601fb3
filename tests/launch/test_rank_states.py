"""Verdicts over what monitors report, without processes or clocks."""

from __future__ import annotations

import json
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.errors import GpipeError, NumericError, PeerError, PeerRaised, StepTimeout
from gpipe_cli.launch.rank_files import ExitReport
from gpipe_cli.launch.rank_states import DIED, SETTLE_SECONDS, RankStates, RankStatus, Surroundings

FINE = RankStatus()
IN_STEP = RankStatus(step_began=17.0)
LOST_PEER = RankStatus(report=ExitReport(7, "another rank is gone", caused_by_peer=True))
FINISHED = RankStatus(report=ExitReport(0), ended=DIED)


def new_states(step_timeout: float | None, ranks: int = 2, interface: str | None = None) -> RankStates:
    hosts = {rank: f"node{rank}" for rank in range(ranks)}
    seen = Surroundings(0, hosts, lambda rank: f"on node{rank}", interface)
    return RankStates(ranks, silence=10.0, step_timeout=step_timeout, surroundings=seen)


def states(step_timeout: float | None = 6.0, ranks: int = 2, interface: str | None = None) -> RankStates:
    made = new_states(step_timeout, ranks, interface)
    for rank in range(ranks):
        made.hear(rank, FINE, 0.1)
    return made


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (RankStatus(ended=DIED), PeerError, r"rank 1 \(on node1\): ended without a report: it was killed"),
        (RankStatus(report=ExitReport(5, "the loss is nan")), NumericError, r"rank 1 \(on node1\): the loss"),
        (RankStatus(report=ExitReport(1, "ValueError")), PeerRaised, r"rank 1 \(on node1\): ValueError"),
    ],
)
def test_a_rank_that_fails_by_itself_is_named_at_once_whoever_lost_it_first(
    status: RankStatus, kind: type[GpipeError], says: str
) -> None:
    made = states()
    made.hear(0, LOST_PEER, 1.0)
    assert made.verdict(1.1) is None, "another rank must have failed before"
    made.hear(1, status, 1.2)
    error = made.verdict(1.2)
    assert type(error) is kind
    with pytest.raises(kind, match=says):
        raise error


@given(st.integers(1, 6), st.data())
def test_a_rank_that_lost_its_peer_is_never_named_before_that_peer(ranks: int, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(0, ranks))
    times = data.draw(st.lists(st.floats(0.1, 9), min_size=ranks + 1, max_size=ranks + 1))
    made = states(ranks=ranks + 1)
    for rank, time in enumerate(times):
        made.hear(rank, RankStatus(report=ExitReport(6, "full disk")) if rank == guilty else LOST_PEER, time)
    assert str(made.verdict(9.0)) == f"rank {guilty} (on node{guilty}): full disk"


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (RankStatus(report=ExitReport(1, "raised")), RankStatus(report=ExitReport(3, "data")), ": raised"),
        (LOST_PEER, LOST_PEER, ": another rank is gone"),
        (
            RankStatus(ended=" was killed by SIGKILL"),
            RankStatus(ended=" was killed by SIGTERM"),
            " was killed by SIGKILL",
        ),
    ],
)
def test_of_ranks_that_failed_alike_the_first_is_named(
    first: RankStatus, second: RankStatus, says: str
) -> None:
    for rank in (0, 1):
        made = states()
        made.hear(rank, first, 1.0)
        made.hear(1 - rank, second, 1.1)
        assert str(made.verdict(inf)) == f"rank {rank} (on node{rank}){says}"


def test_if_nobody_reports_the_cause_the_rank_that_lost_a_peer_is_named() -> None:
    made = states()
    made.hear(0, LOST_PEER, 1.0)
    assert str(made.verdict(1.1 + SETTLE_SECONDS)) == "rank 0 (on node0): another rank is gone"


def test_a_monitor_that_disconnects_has_lost_its_rank_unless_that_has_finished() -> None:
    made = states()
    made.disconnect(1, 1.0)
    assert "rank 1 (on node1): ended without a report" in str(made.verdict(1.0))
    made = states()
    made.hear(1, FINISHED, 1.0)
    made.disconnect(1, 1.0)
    assert made.verdict(100.0) is None or "rank 1" not in str(made.verdict(100.0))


@pytest.mark.parametrize(
    ("silent", "interface", "says"),
    [
        (
            (2,),
            "lo",
            "rank 2 (on node2): not heard of for 10 seconds; "
            "node2 is down, or the network between node0 and node2 is cut",
        ),
        (
            (1, 2),
            "lo",
            "rank 1 (on node1) and rank 2 (on node2): not heard of for 10 seconds; "
            "their hosts are down, or the network between node0 and their hosts is cut",
        ),
        (
            (1, 2, 3),
            None,
            "node0 has lost all other hosts: its own network is cut, or theirs is; "
            "rank 1 (on node1) and rank 2 (on node2) and rank 3 (on node3): not heard of for 10 seconds",
        ),
        (
            (1, 2, 3),
            "gone0",
            "the network link gone0 of node0 is down; "
            "rank 1 (on node1) and rank 2 (on node2) and rank 3 (on node3): not heard of for 10 seconds",
        ),
    ],
)
def test_silent_ranks_are_lost_together_and_a_host_that_is_cut_off_blames_its_own_network(
    silent: tuple[int, ...], interface: str | None, says: str
) -> None:
    """Only the first was named: their last heartbeats were not at the same moment. The cut host blamed the others."""
    made = states(ranks=4, interface=interface)
    for rank in range(4):
        made.hear(rank, FINE, 0.5 if rank in silent[1:] else 0.1)
        if rank not in silent:
            made.hear(rank, FINE, 10.0)
    assert made.verdict(10.0) is None
    error = made.verdict(10.2)
    assert type(error) is PeerError and str(error) == says


def test_a_monitor_that_is_stopped_on_a_host_that_answers_ends_nothing_while_the_others_go_on() -> None:
    """It counted as a host that is down, and its last heartbeat as that of a step that does not end."""
    made = states()
    made.hear(1, IN_STEP, 1.0)
    for now in range(2, 100):
        made.hear(0, RankStatus(step_began=float(now)), now)
        made.reach(1, now - 0.5)
        assert made.verdict(now) is None
    for now in range(100, 107):
        made.hear(0, RankStatus(step_began=99.0), now)
        made.reach(1, now - 0.5)
    assert isinstance(made.verdict(107.0), StepTimeout), "a step that does not end is one, whoever is silent"


def test_hosts_that_do_not_reach_each_other_are_named_as_a_link() -> None:
    """One-way loss between two hosts named all ranks, as in a step that does not end."""
    made = states(ranks=3)
    made.addresses |= {"10.0.0.1": "node0", "10.0.0.2": "node1", "10.0.0.3": "node2"}
    for now in (1.0, 6.9, 7.1):
        for rank, unanswered in enumerate([(), ("10.0.0.3", "192.0.2.7"), ("10.0.0.2",)]):
            made.hear(rank, RankStatus(step_began=17.0, unanswered=unanswered), now)
        error = made.verdict(now)
    assert type(error) is PeerError
    assert str(error) == (
        "the network between node1 and node2 is cut, in one direction or both: packets are not acknowledged, "
        "and a step does not end within step_timeout=6 seconds"
    )


def test_a_finished_rank_may_be_silent() -> None:
    made = states()
    made.hear(0, FINISHED, 1.0)
    assert not made.all_finished
    made.hear(1, FINISHED, 1.0)
    assert made.verdict(1000.0) is None and made.all_finished


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (
            IN_STEP,
            r"rank 0 \(on node0\): in a step that does not end; no answer within step_timeout=6 seconds",
        ),
        (
            RankStatus(suspended=True),
            r"rank 1 \(on node1\): stopped \(SIGSTOP, or a debugger\); no answer within",
        ),
    ],
)
def test_a_rank_that_does_not_go_on_is_a_stall(status: RankStatus, says: str) -> None:
    made = states()
    for now in (1.0, 6.9, 7.1):
        made.hear(0, FINE, now)
        made.hear(1, status, now)
        error = made.verdict(now)
        assert (error is None) == (now < 7.0)
    with pytest.raises(StepTimeout, match=says):
        raise error or AssertionError


def test_without_step_timeout_only_silence_counts() -> None:
    made = states(step_timeout=None)
    for now in (1.0, 1000.0):
        made.hear(0, FINE, now)
        made.hear(1, IN_STEP, now)
        assert made.verdict(now) is None


def test_a_status_survives_the_way_over_the_network() -> None:
    for status in (FINE, IN_STEP, LOST_PEER, FINISHED, RankStatus(unanswered=("10.0.0.1",))):
        assert RankStatus.from_json(json.loads(json.dumps(status.to_json()))) == status


def test_a_step_that_does_not_end_because_a_rank_is_silent_names_that_rank() -> None:
    made = states()
    for now in (1.0, 3.0, 7.1):
        made.hear(0, IN_STEP, now)
        if now < 4:
            made.hear(1, IN_STEP, now)
    made.verdict(1.0)
    assert str(made.verdict(7.1)).startswith("rank 1 (on node1): not heard of for 4 seconds")


def test_a_rank_that_has_not_connected_yet_has_a_minute() -> None:
    made = new_states(step_timeout=None)
    for now in (1.0, 59.0, 61.0):
        made.hear(0, FINE, now)
        assert (made.verdict(now) is None) == (now < 60)
