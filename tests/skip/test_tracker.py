"""Each thread has its own tracker, and `use_skip_tracker` restores the previous one."""

from __future__ import annotations

import threading

import pytest
import torch

from gpipe_cli.skip import Namespace, SkipName
from gpipe_cli.skip.tracker import DictionarySkipTracker, current_skip_tracker, use_skip_tracker

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
    before = current_skip_tracker()
    temporary = DictionarySkipTracker()
    with pytest.raises(ZeroDivisionError), use_skip_tracker(temporary):
        assert current_skip_tracker() is temporary
        _ = 1 / 0
    assert current_skip_tracker() is before


def test_each_thread_has_its_own_tracker() -> None:
    trackers = [current_skip_tracker()]
    with use_skip_tracker(DictionarySkipTracker()):
        threads = [threading.Thread(target=lambda: trackers.append(current_skip_tracker())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(map(id, trackers))) == 3
