"""Namespaces and skip names: equal copies, and one order on every run."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

from gpipe_cli.skip import Namespace, SkipName


def test_each_namespace_is_another_and_hashable() -> None:
    assert len({Namespace() for _ in range(100)}) == 100


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])  # noqa: S301
def test_a_copy_of_a_namespace_equals_it(duplicate: object) -> None:
    assert callable(duplicate)
    namespace = Namespace()
    assert duplicate(namespace) == namespace
    assert hash(duplicate(namespace)) == hash(namespace)


def test_namespaces_are_ordered_by_birth() -> None:
    namespaces = [Namespace() for _ in range(20)]
    assert sorted(set(namespaces)) == namespaces
    assert sorted([SkipName(namespaces[1], "a"), SkipName(namespaces[0], "b")])[0].name == "b"


def test_a_namespace_from_another_process_is_not_taken_for_one_of_ours() -> None:
    """Both processes count from one, so the count alone would make strangers equal."""
    program = (
        "import pickle, sys; from gpipe_cli.skip import Namespace; "
        "sys.stdout.buffer.write(pickle.dumps(Namespace()))"
    )
    strangers = [
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True) for _ in range(2)
    ]
    first, second = (pickle.loads(stranger.stdout) for stranger in strangers)  # noqa: S301
    assert first.number == second.number
    assert first != second
