"""Each thread has its own tracker, and `use_skip_tracker` restores the previous one."""

from __future__ import annotations

import threading

import pytest
import torch

from gpipe_cli.skip import Namespace, SkipName
from gpipe_cli.skip.tracker import DictionarySkipTracker, load_skip, save_skip, use_skip_tracker

NAME = SkipName(Namespace(), "skip")


def test_a_tracker_returns_a_value_once() -> None:
    tracker = DictionarySkipTracker()
    value = torch.zeros(1)
    tracker.save(NAME, value)
    assert tracker.load(NAME) is value
    with pytest.raises(KeyError):
        tracker.load(NAME)


def test_none_can_be_stored() -> None:
    tracker = DictionarySkipTracker()
    tracker.save(NAME, None)
    assert tracker.load(NAME) is None


def test_the_previous_tracker_is_restored_after_an_error() -> None:
    temporary = DictionarySkipTracker()
    with pytest.raises(ZeroDivisionError), use_skip_tracker(temporary):
        save_skip(NAME, None)
        _ = 1 / 0
    with pytest.raises(RuntimeError, match="has not been stashed"):
        load_skip(NAME)
    assert temporary.load(NAME) is None


def test_each_thread_has_its_own_tracker() -> None:
    messages: list[str] = []

    def load() -> None:
        try:
            load_skip(NAME)
        except RuntimeError as error:
            messages.append(str(error))
        save_skip(NAME, None)

    with use_skip_tracker(DictionarySkipTracker()):
        save_skip(NAME, None)
        for _ in range(2):
            thread = threading.Thread(target=load)
            thread.start()
            thread.join()
        assert load_skip(NAME) is None
    assert messages == ["'skip' has not been stashed"] * 2
