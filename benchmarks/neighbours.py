"""Compare the balance by time with all balances that move one layer, measured.

    python -m benchmarks.neighbours

The balances take turns. Even rounds decide which balance is best, by medians; the figure is the median over odd rounds
of the chosen balance's step divided by the best one's. If the same rounds decided both, the luckiest of many equal
balances would win. Two measurements must agree within one layer at every partition boundary.
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
from benchmarks.turns import PipeConfig, milliseconds, prepare
from gpipe_cli.accelerator.devices import available_cores
from gpipe_cli.balance.solver import neighbours
from gpipe_cli.balance.time import balance
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.spec import PipelineSpec

CASES = ("resnet50", "transformer")
PARTITIONS = (2, 4)
CHUNKS = 8
WORSE_AT_MOST = 1.03
LAYERS_APART_AT_MOST = 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours")
    parser.add_argument("--case", action="append", choices=ALL_CASES, help="repeatable")
    parser.add_argument("--partitions", type=int, action="append", help="repeatable")
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
            best, ratio = _compare_with_neighbours(case, chosen, options.rounds)
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


def _compare_with_neighbours(
    case: Case, chosen: tuple[int, ...], rounds: int
) -> tuple[tuple[int, ...], float]:
    """The best measured balance, and the time of the chosen one divided by its time."""
    configs = [PipeConfig(candidate, CHUNKS) for candidate in (chosen, *neighbours(chosen))]
    times = milliseconds(case, configs, rounds)
    best = min(configs, key=lambda config: statistics.median(times[config][::2]))
    ratios = [chosen_ms / best_ms for chosen_ms, best_ms in zip(times[configs[0]], times[best], strict=True)]
    return best.balance, statistics.median(ratios[1::2])


if __name__ == "__main__":
    sys.exit(main())
