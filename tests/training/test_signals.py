from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from gpipe_cli.training.signals import ALL, StopRequested, StopRequests, stop_requests


class Destroyed:
    """Ends as the iterator of a data loader does: in a destructor that takes its time."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_signal_inside_a_destructor_is_not_lost() -> None:
    """Python drops the exception there. Training used to go on after a Ctrl-C between two epochs."""
    taken = []
    with stop_requests() as stops, pytest.raises(StopRequested, match=r"^Ctrl-C$"):
        for item in stops.heeded(range(9)):
            taken.append(item)
            if item == 3:
                Destroyed()
    assert taken == [0, 1, 2, 3]


@pytest.mark.parametrize("number", ALL)
def test_the_first_signal_waits_for_the_next_boundary_and_the_second_for_nothing(number: int) -> None:
    reached = []
    with stop_requests() as stops, pytest.raises(KeyboardInterrupt):
        for _ in stops.heeded(range(9)):
            signal.raise_signal(number)
            reached.append(stops.request.reason if stops.request else None)
            signal.raise_signal(number)
            reached.append("after the second")
    assert reached == ["Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name]


def test_a_time_limit_is_a_request_as_soon_as_stopping_would_take_the_rest_of_it() -> None:
    with stop_requests(deadline=time.monotonic() + 1000) as stops:
        assert stops.request is None
        stops.reserve = 1001
        assert stops.request is not None and stops.request.reason == "time_limit"


def test_whatever_makes_the_items_is_ended_when_somebody_asks_to_stop() -> None:
    ended = []

    def items() -> Iterator[int]:
        try:
            yield from range(9)
        finally:
            ended.append(True)

    with stop_requests() as stops, pytest.raises(StopRequested) as caught:
        for _ in stops.heeded(items()):
            signal.raise_signal(signal.SIGTERM)
    assert ended == [True] and not caught.value.by_keyboard


def test_who_listened_before_listens_again() -> None:
    before = [signal.getsignal(one) for one in ALL]
    with stop_requests() as stops:
        assert [signal.getsignal(one) for one in ALL] == [stops.note] * len(ALL)
        assert list(stops.heeded("abc")) == ["a", "b", "c"]
    assert [signal.getsignal(one) for one in ALL] == before


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under nohup a terminal that closes is none of a run's business."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stops:
            signal.raise_signal(signal.SIGHUP)
            assert stops.request is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_nothing_is_touched() -> None:
    found: list[str] = []

    def run() -> None:
        with stop_requests() as stops:
            found.extend(stops.heeded("ab"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["a", "b"]


def test_processes_heed_what_any_of_them_was_asked_and_ask_each_other_until_then() -> None:
    asked: list[int] = []

    def agree(number: int) -> int:
        asked.append(number)
        return signal.SIGUSR1 if len(asked) == 2 else number

    stops = StopRequests(agree=agree)
    assert stops.agreed() is None and stops.request is None
    for _ in range(2):  # agreed upon is agreed upon: nobody asks again
        request = stops.agreed()
        assert request is not None and request.reason == "SIGUSR1"
    assert asked == [0, 0] and stops.request is not None


def test_a_patient_process_leaves_the_second_signal_to_its_launcher() -> None:
    stops = StopRequests(patient=True)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        stops.note(number, None)
    assert stops.signal == signal.SIGTERM
