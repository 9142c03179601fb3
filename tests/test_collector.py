from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpipe_cli.collector import hold_back, release


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    frozen = gc.get_freeze_count()
    yield
    if gc.get_freeze_count() > frozen:
        gc.unfreeze()
    gc.enable()


def test_what_was_there_is_not_looked_at_again() -> None:
    hold_back()
    assert not gc.isenabled()
    release()
    assert gc.isenabled() and gc.get_freeze_count() > 0


def test_a_collector_that_was_not_held_back_is_left_alone() -> None:
    before = gc.get_freeze_count()
    release()
    assert gc.isenabled() and gc.get_freeze_count() == before


def test_a_command_runs_with_the_collector_at_work() -> None:
    code = (
        "import gc, sys\n"
        "from gpipe_cli.commands import balance\n"
        "from gpipe_cli.__main__ import script\n"
        "balance.run = lambda *_: sys.exit(f'{gc.isenabled()} {gc.get_freeze_count() > 0}')\n"
        "sys.argv = ['gpipe', 'balance', '--by', 'uniform']\n"
        "script()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "True True" in ended.stderr
