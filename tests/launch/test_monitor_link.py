from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gpipe_cli.errors import PeerError
from gpipe_cli.launch.monitor_link import MAX_MONITOR_LINE, Connection, Hub, Spoke
from gpipe_cli.launch.rank_files import ExitReport
from gpipe_cli.launch.rank_states import DIED, RankStates, RankStatus, Surroundings

TOKEN = "secret"
FINE = RankStatus()
FINISHED = RankStatus(report=ExitReport(0), ended=DIED)


class Pair:
    """Both ends, in one process."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = listener.getsockname()
        self.hosts = {0: "node0", 1: "?"}
        seen = Surroundings(0, self.hosts, lambda rank: f"on {self.hosts[rank]}")
        states = RankStates(2, silence=10.0, step_timeout=None, surroundings=seen)
        self.hub = Hub(listener, TOKEN, states, self.hosts)
        self.names = {0: "?", 1: "node1"}
        self.spoke = self.connect()

    def connect(self, token: str = TOKEN) -> Spoke:
        connected = socket.create_connection(self.address)
        greeting = {"token": token, "rank": 1, "host": "node1"}
        seen = Surroundings(1, self.names, lambda rank: f"on {self.names[rank]}")
        return Spoke(connected, greeting, 10.0, seen)

    def exchange(self, now: float, status: RankStatus = FINE) -> None:
        self.hub.poll(5, now)  # the connection
        self.hub.poll(5, now)  # the greeting
        self.spoke.beat(status, now)
        self.hub.poll(5, now)
        self.hub.beat(RankStatus(), now)
        self.spoke.poll(5, now)

    def close(self) -> None:
        self.hub.close()  # first: the other end waits for it
        self.spoke.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_both_ends_learn_the_name_of_the_other_host(pair: Pair) -> None:
    pair.exchange(1.0)
    assert pair.hosts == {0: "node0", 1: "node1"} == pair.names
    assert pair.hub.verdict(10.9) is None is pair.spoke.verdict(10.9)


def test_each_end_misses_a_host_that_does_not_answer_for_the_time_of_silence(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.exchange(1.0)
    assert 0 <= pair.spoke._connection.unanswered_seconds() < 60
    monkeypatch.setattr(Connection, "unanswered_seconds", lambda _: 10.5)
    pair.hub.beat(RankStatus(), 11.5)
    assert str(pair.hub.verdict(11.5)).startswith("rank 1 (on node1): not heard of for 10 seconds")
    assert str(pair.spoke.verdict(11.5)).startswith("rank 0 (on node0): not heard of for 10 seconds")
    assert pair.spoke.reached_alone and not pair.hub.reached_alone


def test_a_monitor_that_neither_reads_nor_sends_is_not_lost_while_its_host_answers(pair: Pair) -> None:
    """A stopped monitor ended a healthy run as "its host is down"."""
    pair.exchange(1.0)
    for now in range(2, 200):
        pair.hub.beat(RankStatus(), now)
        assert pair.hub.verdict(now) is None
    for now in range(2, 200):
        pair.spoke.beat(FINE, now)
        assert pair.spoke.verdict(now) is None


def test_the_verdict_of_rank_0_reaches_the_others_with_its_kind(pair: Pair) -> None:
    pair.exchange(1.0, RankStatus(ended=DIED))
    assert pair.hub.verdict(1.0) is not None
    pair.spoke.poll(5, 1.0)
    error = pair.spoke.verdict(1.0)
    assert type(error) is PeerError and "rank 1 (on node1): ended without a report" in str(error)
    assert not pair.spoke.reached_alone


def test_the_end_of_rank_0s_monitor_is_the_end_of_rank_0(pair: Pair) -> None:
    pair.exchange(1.0)
    pair.hub.close()
    pair.spoke.poll(5, 1.0)
    assert str(pair.spoke.verdict(1.0)).startswith("rank 0 (on node0): ended without a report")


@pytest.mark.parametrize(
    "sent",
    [
        json.dumps({"token": "guessed", "rank": 1, "host": "evil"}).encode() + b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b"x" * (MAX_MONITOR_LINE + 10),
        b"\xff\xfe\n",
    ],
)
def test_a_stranger_is_disconnected_and_changes_nothing(pair: Pair, sent: bytes) -> None:
    pair.exchange(1.0)
    with socket.create_connection(pair.address) as stranger:
        stranger.sendall(sent)
        stranger.settimeout(5)
        pair.hub.poll(5, 1.0)
        for _ in range(4):
            pair.hub.poll(0.1, 1.0)
        with suppress(ConnectionResetError):  # closed before it had read everything
            assert stranger.recv(100) == b""
    assert pair.hosts[1] == "node1" and pair.hub.verdict(1.0) is None


def test_a_monitor_closes_only_after_rank_0_has_heard_its_last_word(pair: Pair) -> None:
    pair.exchange(1.0)
    pair.spoke.beat(FINISHED, 1.0)
    closing = threading.Thread(target=pair.spoke.close)
    closing.start()
    for _ in range(2):  # the last word, and the end of the connection
        pair.hub.poll(5, 1.0)
    closing.join(5)
    pair.hub.beat(FINISHED, 1.0)
    assert not closing.is_alive() and pair.hub.finished and pair.hub.verdict(1.0) is None


def test_all_have_finished_when_each_says_so(pair: Pair) -> None:
    pair.exchange(1.0, FINISHED)
    assert pair.spoke.finished and not pair.hub.finished
    pair.hub.beat(FINISHED, 1.0)
    assert pair.hub.finished
