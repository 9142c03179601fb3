"""Skips have names that sort the same on every run, and each thread has a tracker of its own."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable

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


def pickle_round_trip(namespace: Namespace) -> Namespace:
    duplicate: Namespace = pickle.loads(pickle.dumps(namespace))  # noqa: S301 - our own bytes
    return duplicate


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle_round_trip])
def test_a_copy_of_a_namespace_equals_it(duplicate: Callable[[Namespace], Namespace]) -> None:
    namespace = Namespace()
    assert duplicate(namespace) == namespace
    assert hash(duplicate(namespace)) == hash(namespace)


def test_namespaces_sort_in_the_order_they_were_created() -> None:
    namespaces = [Namespace() for _ in range(20)]
    assert sorted(set(namespaces)) == namespaces
    assert sorted([SkipName(namespaces[1], "a"), SkipName(namespaces[0], "b")])[0].name == "b"


@pytest.mark.slow
def test_namespaces_from_different_processes_differ() -> None:
    """Each process counts from one, so the number alone would make them equal."""
    program = (
        "import pickle, sys; from gpipe_cli.skip import Namespace; "
        "sys.stdout.buffer.write(pickle.dumps(Namespace()))"
    )
    results = [
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True) for _ in range(2)
    ]
    first, second = (pickle.loads(result.stdout) for result in results)  # noqa: S301
    assert first.number == second.number
    assert first != second
