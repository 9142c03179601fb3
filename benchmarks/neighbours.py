"""How good the balance by time is: beside all balances that have one layer elsewhere, tried for real.

    python -m benchmarks.neighbours

The balances take turns. Every other round decides which one is best, by medians; what counts is the median, over the
rounds between, of the chosen one's step over that one's: the best of many that are equal would else be the luckiest,
and the chosen one look bad beside it. Two runs of measuring must agree within one layer at every border.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import accumulate

from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES as ALL_CASES
from benchmarks.cases import Case, build
from benchmarks.turns import Way, milliseconds, prepare
from gpipe_cli.accelerator.devices import available_cores
from gpipe_cli.balance.solver import neighbours
from gpipe_cli.balance.time import balance
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.schedule.pipeline_spec import PipelineSpec

CASES = ("resnet50", "transformer")
PARTITIONS = (2, 4)
CHUNKS = 8
WORSE_AT_MOST = 1.03
LAYERS_APART_AT_MOST = 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours")
    parser.add_argument("--case", action="append", choices=ALL_CASES, help="may be given again")
    parser.add_argument("--partitions", type=int, action="append", help="may be given again")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each balance measures")
    options = parser.parse_args()
    console = Console()
    prepare(console)
    table = Table("case", "balance", "again", "best neighbour", "x best", "at most", box=None)
    missed = 0
    for name in options.case or CASES:
        case = build(name)
        for partitions in options.partitions or PARTITIONS:
            chosen, again = (_balance(case, partitions, options.seconds) for _ in range(2))
            best, ratio = _beside_neighbours(case, chosen, options.rounds)
            apart = max(abs(a - b) for a, b in zip(accumulate(chosen), accumulate(again), strict=True))
            missed += ratio > WORSE_AT_MOST or apart > LAYERS_APART_AT_MOST
            table.add_row(
                name, str(list(chosen)), str(list(again)), str(list(best)), f"{ratio:.3f}", f"{WORSE_AT_MOST}"
            )
    console.print(table)
    return missed


def _balance(case: Case, partitions: int, seconds: float) -> tuple[int, ...]:
    sample = Sample(case.input.tensor_split(CHUNKS)[0], case.target.tensor_split(CHUNKS)[0], case.loss)
    spec = PipelineSpec("gpipe", partitions, CHUNKS, cores=available_cores())
    return tuple(balance(case.model, sample, partitions, spec, seconds=seconds).layers)


def _beside_neighbours(case: Case, chosen: tuple[int, ...], rounds: int) -> tuple[tuple[int, ...], float]:
    """The best balance tried, and how many times as long the chosen one takes."""
    ways = [Way(one, CHUNKS) for one in (chosen, *neighbours(chosen))]
    times = milliseconds(case, ways, rounds)
    best = min(ways, key=lambda way: statistics.median(times[way][::2]))
    ratios = [one / other for one, other in zip(times[ways[0]], times[best], strict=True)]
    return best.balance, statistics.median(ratios[1::2])


if __name__ == "__main__":
    sys.exit(main())
