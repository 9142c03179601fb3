from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rank_memory import Observation, _look, _ranks


@pytest.mark.parametrize(
    ("program", "environment"),
    [
        ("import sys; sys.stdin.read()", {"RANK": "1"}),
        ("import os, sys; os.fork() and os.fork(); sys.stdin.read()", {"WORLD_SIZE": "2"}),
    ],
    ids=["started", "forked by a server"],
)
def test_a_rank_is_found_below_the_launcher_and_its_peak_read(
    program: str, environment: dict[str, str]
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **environment}, stdin=subprocess.PIPE
    )
    try:
        while "rank 1" not in [name for _, name in _ranks(os.getpid())]:
            assert child.poll() is None  # it has another environment until it has started
        observation = Observation()
        _look(os.getpid(), Path("no run yet"), observation, 1.0)
        assert observation.peaks["rank 1"] > 0 and not observation.first_step
    finally:
        child.communicate(b"\n")


def test_times_are_those_of_the_first_row_and_of_the_first_manifest(tmp_path: Path) -> None:
    observation = Observation()
    (tmp_path / "metrics.jsonl").write_text('{"split": "train"}\n')
    _look(os.getpid(), tmp_path, observation, 2.0)
    assert (observation.first_step, observation.saved) == (2.0, 0.0)
    (tmp_path / "snapshots" / "step-00000001").mkdir(parents=True)
    (tmp_path / "snapshots" / "step-00000001" / "manifest.json").touch()
    _look(os.getpid(), tmp_path, observation, 5.0)
    assert observation.saved == 3.0
