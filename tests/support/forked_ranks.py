"""Fork processes that form a process group, wait for them, and leave none behind.

They are forked because importing torch in each would take longer than their work; `tests/test_rank_faults.py` tests
ranks that start in a new interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed

RankFunction = Callable[[int, int, Path], None]
"""Takes its rank, the number of ranks, and a folder for its results."""


def run_ranks(function: RankFunction, ranks: int, folder: Path, seconds: float = 200) -> None:
    """Run the function in `ranks` processes of one group; raise if one fails or they take longer than `seconds`."""
    codes = exit_codes(function, ranks, folder, seconds)
    assert codes == [0] * ranks, f"exit codes {codes}; see the captured output of the ranks"


def exit_codes(function: RankFunction, ranks: int, folder: Path, seconds: float = 200) -> list[int | None]:
    """How each rank ended; minus the number of a signal, or None for a rank that took longer than `seconds`."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_run_rank, args=(function, rank, ranks, folder), daemon=True)
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _run_rank(function: RankFunction, rank: int, ranks: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=ranks
    )
    function(rank, ranks, folder)
    distributed.destroy_process_group()
