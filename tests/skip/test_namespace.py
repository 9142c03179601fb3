"""Namespaces and skip names: copies are equal, and the order is the same on every run."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest

from gpipe_cli.skip import Namespace, SkipName


def test_namespaces_are_distinct_and_hashable() -> None:
    assert len({Namespace() for _ in range(100)}) == 100


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
