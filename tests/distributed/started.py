"""Processes for tests that meet over a file: forked together, waited for, and none left behind.

Forked, because each would else import torch anew, which takes longer than its work; that ranks start from nothing is
tested where they are launched (`tests/test_rank_faults.py`).
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed

Work = Callable[[int, int, Path], None]
"""Takes its rank, the number of ranks, and a folder for what it finds."""


def run_ranks(work: Work, ranks: int, folder: Path, seconds: float = 200) -> None:
    """Let so many processes do their work, connected with each other; raise if one fails or they take longer."""
    context = multiprocessing.get_context("fork")
    started = [
        context.Process(target=_connected, args=(work, rank, ranks, folder), daemon=True)
        for rank in range(ranks)
    ]
    until = time.monotonic() + seconds
    try:
        for one in started:
            one.start()
        for one in started:
            one.join(max(0.0, until - time.monotonic()))
        codes = [one.exitcode for one in started]
    finally:
        for one in started:
            if one.is_alive():
                one.kill()
                one.join()
    assert codes == [0] * ranks, f"exit codes {codes}; what they said is among what was captured"


def _connected(work: Work, rank: int, ranks: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=ranks
    )
    work(rank, ranks, folder)
    distributed.destroy_process_group()
