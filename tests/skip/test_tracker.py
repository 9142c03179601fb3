"""Whose skips are whose: trackers belong to threads, and are given back."""

from __future__ import annotations

import threading

import pytest
import torch

from gpipe_cli.skip import Namespace, SkipName
from gpipe_cli.skip.tracker import DictionarySkipTracker, current_skip_tracker, use_skip_tracker

NAME = SkipName(Namespace(), "skip")


def test_a_tracker_gives_a_value_once() -> None:
    tracker = DictionarySkipTracker()
    value = torch.zeros(1)
    tracker.save(NAME, value)
    assert tracker.load(NAME) is value
    with pytest.raises(KeyError):
        tracker.load(NAME)


def test_none_is_a_value_too() -> None:
    tracker = DictionarySkipTracker()
    tracker.save(NAME, None)
    assert tracker.load(NAME) is None


def test_a_lent_tracker_is_given_back_also_after_an_error() -> None:
    before = current_skip_tracker()
    lent = DictionarySkipTracker()
    with pytest.raises(ZeroDivisionError), use_skip_tracker(lent):
        assert current_skip_tracker() is lent
        _ = 1 / 0
    assert current_skip_tracker() is before


def test_each_thread_has_its_own_tracker() -> None:
    seen = [current_skip_tracker()]
    with use_skip_tracker(DictionarySkipTracker()):
        threads = [threading.Thread(target=lambda: seen.append(current_skip_tracker())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(map(id, seen))) == 3
