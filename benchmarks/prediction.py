"""How well the simulator predicts a step: simulated beside measured, for many ways to run a case.

    python -m benchmarks.prediction

Layers are profiled at the size of a micro-batch, alone and while every core does the same: workers share caches,
memory and the interpreter, which no schedule knows of. Both predictions are shown; the claim is about the second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from itertools import product

from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES as ALL_CASES
from benchmarks.cases import build
from benchmarks.turns import Way, layer_profiles, milliseconds, prepare
from gpipe_cli.balance.solver import solve
from gpipe_cli.balance.time import partition_costs
from gpipe_cli.engines.devices import available_cores
from gpipe_cli.profiling.layers import LayerProfile
from gpipe_cli.schedule.course import Course

CASES = ("resnet50", "transformer")
PARTITIONS = (2, 4)
CHUNKS = 8
MODES = (
    ("gpipe", "never"),
    ("1f1b", "never"),
    ("zero_bubble", "never"),
    ("gpipe", "except_last"),
    ("1f1b", "except_last"),
)
MEDIAN_ERROR_AT_MOST = 0.10


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction")
    parser.add_argument("--case", action="append", choices=ALL_CASES, help="may be given again")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each profile measures")
    options = parser.parse_args()
    console = Console()
    prepare(console)
    table = Table("case", "way", "ms", "simulated", "error", "by profile alone", "error", box=None)
    errors: list[float] = []
    for name in options.case or CASES:
        case = build(name)
        alone = layer_profiles(case, CHUNKS, options.seconds)
        beside = layer_profiles(case, CHUNKS, options.seconds, busy_workers=available_cores())
        for way, times in milliseconds(case, _ways(alone), options.rounds).items():
            measured = statistics.median(times)
            predictions = [_predicted(layers, way) for layers in (beside, alone)]
            both = [predicted / measured - 1 for predicted in predictions]
            errors.append(abs(both[0]))
            cells = [
                text
                for one, error in zip(predictions, both, strict=True)
                for text in (_ms(one), _share(error))
            ]
            table.add_row(name, str(way), _ms(measured), *cells)
    console.print(table)
    found = statistics.median(errors)
    console.print(
        f"median error of {len(errors)} configurations: {100 * found:.1f} %, at most {100 * MEDIAN_ERROR_AT_MOST:.0f} %"
    )
    return found > MEDIAN_ERROR_AT_MOST


def _ways(layers: Sequence[LayerProfile]) -> list[Way]:
    balances = [tuple(solve([one.ms for one in layers], partitions).balance) for partitions in PARTITIONS]
    return [Way(balance, CHUNKS, *mode) for balance, mode in product(balances, MODES)]


def _predicted(layers: Sequence[LayerProfile], way: Way) -> float:
    course = Course(way.schedule, len(way.balance), way.chunks, way.checkpoint, cores=available_cores())
    return course.simulate(partition_costs(layers, way.balance)).step


def _ms(number: float) -> str:
    return f"{number:.0f}"


def _share(number: float) -> str:
    return f"{100 * number:+.1f} %"


if __name__ == "__main__":
    sys.exit(main())
