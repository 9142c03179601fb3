from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gpipe_cli.errors import Interrupted, Stopped
from gpipe_cli.training.signals import (
    STOP_SIGNALS,
    SignalInbox,
    StopNow,
    StopRequested,
    StopRequests,
    defer_signals,
    handlers_installed,
    stop_immediately,
    stop_requests,
)


class Destroyed:
    """Ends as the iterator of a data loader does: in a destructor that takes its time."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_signal_inside_a_destructor_is_not_lost() -> None:
    """Python drops the exception there. Training used to continue after a Ctrl-C between two epochs."""
    taken = []
    with stop_requests() as stops, pytest.raises(StopRequested, match=r"^Ctrl-C$"):
        for item in stops.until_stopped(range(9)):
            taken.append(item)
            if item == 3:
                Destroyed()
    assert taken == [0, 1, 2, 3]


@pytest.mark.parametrize("number", STOP_SIGNALS[1:])
def test_a_burst_of_signals_is_one_request(number: int) -> None:
    """bash and the kernel each send SIGHUP when a terminal closes; the second used to count as "end at once"."""
    taken = []
    with stop_requests() as stops, pytest.raises(StopRequested, match=signal.Signals(number).name):
        for item in stops.until_stopped(range(9)):
            for _ in range(6):
                signal.raise_signal(number)
            taken.append(item)
    assert taken == [0]


def test_the_second_ctrl_c_waits_for_nothing_and_further_ones_change_nothing() -> None:
    with stop_requests() as stops:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        for _ in range(4):
            signal.raise_signal(signal.SIGINT)
        assert stops.request is not None and stops.request.by_keyboard


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Stopped), (signal.SIGHUP, Stopped)]
)
def test_where_nothing_can_be_saved_the_first_signal_ends_the_command(
    number: int, kind: type[Stopped]
) -> None:
    """SIGTERM while a plan was searched or layers were timed used to kill the process with 143."""
    with pytest.raises(StopNow) as stopped, stop_immediately():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGTERM)  # the rest of a burst does not disturb the clean-up
            cleaned_up = True
    assert cleaned_up and type(stopped.value.request.error("")) is kind


def test_a_signal_from_before_the_imports_is_heeded_after_them() -> None:
    with handlers_installed(), pytest.raises(StopNow, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
        with stop_immediately():
            raise AssertionError("the command must not begin")


def test_what_somebody_makes_of_the_interruption_does_not_hide_it() -> None:
    with pytest.raises(StopNow, match="SIGTERM"), stop_immediately():
        try:
            signal.raise_signal(signal.SIGTERM)
        except StopNow as error:
            raise ImportError("a C extension that was interrupted") from error


def test_an_interruption_that_was_swallowed_is_heeded_at_the_next_boundary() -> None:
    with stop_immediately():
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        with stop_requests() as stops, pytest.raises(StopRequested, match="SIGTERM"):
            next(stops.until_stopped(range(9)))


def test_while_a_run_has_something_to_save_no_signal_raises() -> None:
    with stop_immediately(), defer_signals():
        signal.raise_signal(signal.SIGTERM)
        with stop_requests() as stops:
            assert stops.request is not None


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
        for _ in stops.until_stopped(items()):
            signal.raise_signal(signal.SIGTERM)
    assert ended == [True] and not caught.value.by_keyboard


def test_who_listened_before_listens_again() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with stop_requests() as stops:
        assert not {signal.getsignal(number) for number in STOP_SIGNALS} & set(before)
        assert list(stops.until_stopped("abc")) == ["a", "b", "c"]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


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
    items: list[str] = []

    def run() -> None:
        with stop_requests() as stops:
            items.extend(stops.until_stopped("ab"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert items == ["a", "b"]


def test_processes_heed_what_any_of_them_was_asked_and_ask_each_other_until_then() -> None:
    numbers: list[int] = []

    def agree(number: int) -> int:
        numbers.append(number)
        return signal.SIGUSR1 if len(numbers) == 2 else number

    stops = StopRequests(SignalInbox(), agree=agree)
    assert stops.agreed() is None and stops.request is None
    for _ in range(2):  # once the processes have agreed, they do not ask each other again
        request = stops.agreed()
        assert request is not None and request.reason == "SIGUSR1"
    assert numbers == [0, 0] and stops.request is not None


def test_a_patient_process_leaves_the_second_ctrl_c_to_its_launcher() -> None:
    with stop_requests(patient=True) as stops:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert stops.signal == signal.SIGINT
