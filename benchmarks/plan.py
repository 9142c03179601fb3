"""Compare the step time that the planner predicts with the measured one, for many configurations of four models.

    python -m benchmarks.plan --case resnet50

Every round runs every configuration, right after the costs of its size of micro-batch are measured, so that a machine
whose speed varies is compared with itself; the figure is the median over all rounds of predicted divided by measured
time. Turns in which other processes used the machine are repeated. Everything runs with one intra-op thread.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES as ALL_CASES
from benchmarks.cases import Case, build
from benchmarks.turns import PipeConfig, milliseconds, prepare, undisturbed
from gpipe_cli.accelerator.devices import available_cores
from gpipe_cli.balance.solver import solve
from gpipe_cli.plan.measured import SECONDS_OF_PHASES, MeasuredCosts
from gpipe_cli.plan.search import PlanShape
from gpipe_cli.plan.step_time import step_ms
from gpipe_cli.profiling.layer_times import layer_times
from gpipe_cli.profiling.model_stats import model_stats
from gpipe_cli.profiling.phase_times import MeasuredPipeline, PhaseTimes
from gpipe_cli.profiling.records import LayerTimes, Sample

CASES = ("resnet50", "transformer", "mlp", "unet")
SHAPES = (
    PlanShape(1, 1, 1, "1f1b", "never"),
    PlanShape(1, 1, 8, "1f1b", "always"),
    PlanShape(2, 2, 4, "gpipe", "except_last"),
    PlanShape(2, 2, 4, "1f1b", "never"),
    PlanShape(2, 2, 8, "gpipe", "never"),
    PlanShape(2, 2, 8, "1f1b", "always"),
    PlanShape(3, 3, 8, "1f1b", "except_last"),
    PlanShape(4, 4, 8, "gpipe", "never"),
    PlanShape(4, 4, 16, "1f1b", "never"),
    PlanShape(4, 4, 16, "gpipe", "always"),
)
MEDIAN_AT_MOST, NINE_OF_TEN_AT_MOST, TAU_AT_LEAST, REGRET_AT_MOST = 0.06, 0.14, 0.9, 0.05


@final
@dataclass
class Row:
    case: str
    config: PipeConfig
    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)

    @property
    def error(self) -> float:
        pairs = zip(self.predicted, self.measured, strict=True)
        return statistics.median(predicted / measured for predicted, measured in pairs) - 1

    @property
    def ms(self) -> float:
        return statistics.median(self.measured)

    @property
    def predicted_ms(self) -> float:
        """The predicted time, scaled to the median round."""
        return self.ms * (1 + self.error)


@final
class Bench:
    """Measured layer costs of a case, by the number of micro-batches and of workers."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._layers = {shape.chunks: self._profile(shape.chunks) for shape in SHAPES}
        self._kinds = model_stats(self._clean(), self._sample(1), count_flops=False).layer_sample()
        self._size: tuple[int, int] | None = None
        """The chunks and workers that were measured last."""
        self._rounds: dict[PipeConfig, list[PhaseTimes]] = defaultdict(list)

    def balance(self, shape: PlanShape) -> tuple[int, ...]:
        return tuple(solve([layer.ms for layer in self._layers[shape.chunks]], shape.partitions).balance)

    def measure(self, config: PipeConfig) -> None:
        """Measure the costs from which another round of this configuration is predicted.

        Configurations that need the same costs follow each other, and share them.
        """
        size = config.chunks, len(config.balance)
        if size != self._size:
            self._size, self._last = size, undisturbed(partial(self._phase_times, config))
        self._rounds[config].append(self._last)

    def predicted(self, config: PipeConfig, shape: PlanShape) -> list[float]:
        """The predicted step time in milliseconds for each round."""
        spec = shape.spec(available_cores())
        # As in gpipe plan: equal layers cost the same.
        costs = partial(MeasuredCosts, self._layers[shape.chunks], sample=self._kinds)
        return [
            step_ms(spec, costs(phases=phases).costs(None), config.balance) for phases in self._rounds[config]
        ]

    def _phase_times(self, config: PipeConfig) -> PhaseTimes:
        devices = [torch.device("cpu")] * len(config.balance)
        pipeline = MeasuredPipeline(
            self._clean(),
            self._sample(config.chunks),
            config.balance,
            devices,
            config.chunks,
            available_cores(),
        )
        return pipeline.phase_times(SECONDS_OF_PHASES, split=False)

    def _profile(self, chunks: int) -> list[LayerTimes]:
        return layer_times(self._clean(), self._sample(chunks), runs=3)

    def _sample(self, chunks: int) -> Sample:
        case = self.case
        return Sample(case.input.tensor_split(chunks)[0], case.target.tensor_split(chunks)[0], case.loss)

    def _clean(self) -> torch.nn.Sequential:
        for parameter in self.case.model.parameters():
            parameter.grad = None
        return self.case.model


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan")
    parser.add_argument("--case", action="append", choices=ALL_CASES, help="repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    console = Console()
    prepare(console)
    rows: list[Row] = []
    for name in options.case or CASES:
        of_case = _rows(name, options.rounds)
        _show(console, of_case)
        rows += of_case
    return _judge(console, rows)


def _rows(name: str, rounds: int) -> list[Row]:
    bench = Bench(build(name))
    configs = {
        PipeConfig(bench.balance(shape), shape.chunks, shape.schedule, shape.checkpoint): shape
        for shape in SHAPES
    }
    times = milliseconds(bench.case, list(configs), rounds, before_turn=bench.measure)
    return [
        Row(name, config, bench.predicted(config, shape), list(times[config]))
        for config, shape in configs.items()
    ]


def _show(console: Console, rows: Iterable[Row]) -> None:
    table = Table("case", "configuration", "chunks", "measured ms", "predicted ms", "error", box=None)
    for row in rows:
        table.add_row(
            row.case,
            str(row.config),
            str(row.config.chunks),
            f"{row.ms:.1f}",
            f"{row.predicted_ms:.1f}",
            f"{100 * row.error:+.1f} %",
        )
    console.print(table)


def _judge(console: Console, rows: Sequence[Row]) -> int:
    """Print the claims; return how many were missed."""
    errors = sorted(abs(row.error) for row in rows)
    within = {
        name: [row for row in rows if row.case == name] for name in dict.fromkeys(row.case for row in rows)
    }
    regrets = {name: _regret(case_rows) for name, case_rows in within.items()}
    figures = {
        f"median error of {len(rows)} configurations": (statistics.median(errors), MEDIAN_AT_MOST),
        "nine of ten are within": (errors[math.ceil(0.9 * len(errors)) - 1], NINE_OF_TEN_AT_MOST),
        "Kendall tau over all falls short of 1 by": (1 - _tau(rows), 1 - TAU_AT_LEAST),
        **{
            f"{name}: the chosen configuration over the best": (regret, REGRET_AT_MOST)
            for name, regret in regrets.items()
        },
    }
    for claim, (value, most) in figures.items():
        console.print(f"{claim}: {100 * value:.1f} %, at most {100 * most:.0f} %")
    taus = ", ".join(f"{name} {_tau(case_rows):.2f}" for name, case_rows in within.items())
    console.print(f"Kendall tau within each case, no claim: {taus}")
    return sum(value > most for value, most in figures.values())


def _tau(rows: Sequence[Row]) -> float:
    """The share of pairs in the right order minus that of pairs in the wrong order."""
    pairs = list(combinations(rows, 2))
    agree = sum((a.ms - b.ms) * (a.predicted_ms - b.predicted_ms) > 0 for a, b in pairs)
    return (2 * agree - len(pairs)) / len(pairs) if pairs else 1.0


def _regret(rows: Sequence[Row]) -> float:
    chosen = min(rows, key=lambda row: row.predicted_ms)
    return chosen.ms / min(row.ms for row in rows) - 1


if __name__ == "__main__":
    sys.exit(main())
