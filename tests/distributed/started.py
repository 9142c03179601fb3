"""Processes for tests that meet over a file: started together, waited for, and none left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(entry: Sequence[str], ranks: int, folder: Path, seconds: float = 200) -> None:
    """`python <entry> <rank> <ranks> <folder>` for each; raise with what they said if one fails or they take longer."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error::UserWarning", *entry, str(rank), str(ranks), str(folder)],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [one.communicate(timeout=seconds)[0] for one in started]
    finally:
        for one in started:
            one.kill()
            one.communicate()
    assert [one.returncode for one in started] == [0] * ranks, "\n".join(said)
