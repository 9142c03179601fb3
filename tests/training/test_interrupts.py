from __future__ import annotations

import signal
import threading

import pytest

from gpipe_cli.training.interrupts import interrupts


class Destroyed:
    """Ends as the iterator of a data loader does: in a destructor that takes its time."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_inside_a_destructor_is_not_lost() -> None:
    """Python drops the exception there. Training used to go on after a Ctrl-C between two epochs."""
    taken = []
    with interrupts() as ctrl_c, pytest.raises(KeyboardInterrupt):
        for item in ctrl_c.heeded(range(9)):
            taken.append(item)
            if item == 3:
                Destroyed()
    assert taken == [0, 1, 2, 3]


def test_the_first_interrupt_waits_for_the_next_boundary_and_the_second_for_nothing() -> None:
    reached = []
    with interrupts() as ctrl_c, pytest.raises(KeyboardInterrupt):
        for _ in ctrl_c.heeded(range(9)):
            signal.raise_signal(signal.SIGINT)
            reached.append("after the first")
            signal.raise_signal(signal.SIGINT)
            reached.append("after the second")
    assert reached == ["after the first"]


def test_who_listened_before_listens_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts() as ctrl_c:
        assert signal.getsignal(signal.SIGINT) == ctrl_c.note
        assert list(ctrl_c.heeded("abc")) == ["a", "b", "c"]
    assert signal.getsignal(signal.SIGINT) == before


def test_outside_the_main_thread_nothing_is_touched() -> None:
    found: list[str] = []

    def run() -> None:
        with interrupts() as ctrl_c:
            found.extend(ctrl_c.heeded("ab"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["a", "b"]
