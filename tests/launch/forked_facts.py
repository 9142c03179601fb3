"""What a forked rank writes about itself, for the test that started it."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

IMPORTED_BY = os.getpid()
SECONDS = 60


def write_facts(folder: str) -> NoReturn:
    rank = os.environ["RANK"]
    facts: dict[str, Any] = {
        "process": os.getpid(),
        "parent": os.getppid(),
        "imported_by": IMPORTED_BY,
        "random": random.random(),
        "environment": dict(os.environ),
    }
    if "numpy.random" in sys.modules:
        facts["numpy"] = sys.modules["numpy.random"].random()
    if "torch" in sys.modules:
        facts |= thread_facts()
    (Path(folder) / rank).write_text(json.dumps(facts))
    os._exit(3 * int(rank))


def thread_facts() -> dict[str, Any]:
    import torch

    default, matrix, threads = torch.get_num_threads(), torch.rand(600, 600), {}
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        _ = matrix @ matrix + matrix.exp()
        threads[count] = len(list(Path("/proc/self/task").iterdir()))
    return {"default_threads": default, "threads": threads}


def environment_of(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "gpipe",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def default_threads() -> int:
    """Those of torch in a new interpreter."""
    line = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    return int(subprocess.check_output(line))


def wait_for(pidfd: int) -> None:
    assert select.select([pidfd], [], [], SECONDS)[0], "still running"
