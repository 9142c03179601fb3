"""How long gpipe takes to answer without working, beside the import of what it is built on.

    python -m benchmarks.startup

The commands take turns; each figure is the median of its ratios to the baseline of the same round.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
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


def main() -> int:
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
