"""How long `gpipe balance` takes, including start-up.

    python -m benchmarks.answers

Seconds on this machine, not a ratio: the promise is about how long you wait.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from benchmarks.startup import seconds
from benchmarks.turns import prepare

ROUNDS = 3
# Each command, and how many seconds it may take on two cores.
COMMANDS: dict[str, float] = {
    "balance --by time model=resnet101": 20.0,
    "balance --by size model=resnet101": 20.0,
    "balance --by params model=resnet101": 5.0,
    "balance --by uniform model=resnet101": 5.0,
}


def main() -> int:
    console = Console()
    prepare(console)
    table = Table("command", "seconds", "at most", box=None)
    missed = 0
    for words, bound in COMMANDS.items():
        fastest = min(seconds([sys.executable, "-m", "gpipe_cli", *words.split()]) for _ in range(ROUNDS))
        missed += fastest > bound
        table.add_row(f"gpipe {words}", f"{fastest:.1f}", f"{bound:.0f}")
    console.print(table)
    return missed


if __name__ == "__main__":
    sys.exit(main())
