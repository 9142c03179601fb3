"""How long gpipe takes to answer without working, beside the import of what it is built on.

    python -m benchmarks.startup [--ranks ROUNDS]

The commands take turns; each figure is the median of its ratios to the baseline of the same round. With --ranks, the
CPU time of a run of four ranks and one step, of all its processes, over that of importing what one of them imports.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from rich.console import Console
from rich.table import Table

ROUNDS = 15
BASELINE = [sys.executable, "-c", "import hydra, rich.console, rich.progress"]
# What is run, and how many times the baseline it may take; None where nothing is claimed.
COMMANDS: dict[str, tuple[list[str], float | None]] = {
    "gpipe --help": (["--help"], 1.5),
    "gpipe ls models": (["ls", "models"], 1.5),
    "gpipe train --cfg job": (["train", "--cfg", "job"], None),
    "gpipe train chunk=8 (refused)": (["train", "chunk=8"], None),
}


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, capture_output=True, check=False)
    return time.perf_counter() - began


RANKS = "train engine=processes devices=[cpu,cpu,cpu,cpu] balance=uniform model=mlp data=synthetic steps=1"
IMPORT = [sys.executable, "-c", "import gpipe_cli.commands.train"]


def cpu_seconds(command: list[str], folder: str) -> float:
    """The CPU time of a command and of all processes that it started and waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ranks(rounds: int) -> int:
    ratios = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            imports = cpu_seconds(IMPORT, folder)
            run = cpu_seconds([sys.executable, "-m", "gpipe_cli", *RANKS.split()], folder)
        ratios.append(run / imports)
        Console().print(f"import {imports:.2f} s, run of four ranks {run:.2f} s: {ratios[-1]:.2f}")
    Console().print(
        f"CPU time of a run of four ranks and one step: {statistics.median(ratios):.2f} x one import"
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--ranks", type=int, metavar="ROUNDS")
    options = parser.parse_args()
    return commands() if options.ranks is None else ranks(options.ranks)


def commands() -> int:
    ratios: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        baseline = seconds(BASELINE)
        for name, (words, _) in COMMANDS.items():
            ratios[name].append(seconds([sys.executable, "-m", "gpipe_cli", *words]) / baseline)
    table = Table("command", "x import", "at most", box=None)
    missed = 0
    for name, (_, bound) in COMMANDS.items():
        ratio = statistics.median(ratios[name])
        missed += bound is not None and ratio > bound
        table.add_row(name, f"{ratio:.2f}", "-" if bound is None else f"{bound:.2f}")
    Console().print(table)
    return missed


if __name__ == "__main__":
    sys.exit(main())
