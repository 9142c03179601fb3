"""Published iteration times of GPT on A100s beside the planner's estimate for the same settings.

Each row is a model that Megatron would build, counted with fake tensors, under 1F1B with its own balance. Fitting uses
the rows of some sizes of the model and is judged by those of the others.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.models import megatron_gpt
from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.device_table import DEVICES
from gpipe_cli.plan.estimated import DeviceRun, Efficiency, LayerUpdate, estimate_costs
from gpipe_cli.plan.step_time import step_ms
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.spec import PipelineSpec
from gpipe_cli.torch_internals.deferred_values import without_values

ROWS = Path(__file__).parent / "data" / "a100_gpt_iterations.csv"
VOCABULARY = 50_257
HALF, ADAM = 2, 12
"""Bytes of a parameter, and of its fp32 copy with Adam's two moments."""
FITTED = ("unaligned", "bandwidth", "launch_ms")
"""The efficiencies that nothing else is published about."""
SHIPPED = Efficiency()
STEPS = (1.1, 1.02)
"""By which factors the fit changes one efficiency at a time."""


@final
@dataclass(frozen=True)
class Row:
    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    data_parallel: int
    pipeline: int
    iteration_ms: float

    @property
    def size(self) -> tuple[int, int]:
        return self.hidden, self.layers

    @property
    def balance(self) -> list[int]:
        """Blocks evenly; the embedding is with the first and the head with the last."""
        blocks, rest = divmod(self.layers, self.pipeline)
        balance = [blocks + (partition < rest) for partition in range(self.pipeline)]
        balance[0] += 1
        balance[-1] += 1
        return balance

    @property
    def chunks(self) -> int:
        """Micro-batches of one replica; the last may have fewer rows."""
        return -(-self.global_batch // (self.data_parallel * self.micro_batch))

    def refusal(self) -> str | None:
        """Why no such run exists."""
        if min(astuple(self)) <= 0:
            return "every number must be positive"
        if self.hidden % self.heads:
            return f"hidden={self.hidden} does not divide among heads={self.heads}"
        if self.pipeline > self.layers:
            return f"pipeline={self.pipeline} has more partitions than layers={self.layers}"
        if self.global_batch < self.data_parallel:
            return f"global_batch={self.global_batch} is less than a row for each replica"
        return None


def read_rows(path: Path = ROWS) -> list[Row]:
    names = [field.name for field in fields(Row)]
    *counts, _ = names
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in names if name not in (reader.fieldnames or ())]:
            raise ValueError(f"no column {', '.join(missing)}")
        rows = [
            Row(**{**{name: int(row[name]) for name in counts}, "iteration_ms": float(row["iteration_ms"])})
            for row in reader
        ]
    if not rows:
        raise ValueError("no rows")
    for line, row in enumerate(rows, start=2):
        if (refusal := row.refusal()) is not None:
            raise ValueError(f"line {line}: {refusal}")
    return rows


def estimate(row: Row, reached: Efficiency = SHIPPED) -> float:
    """Milliseconds of an iteration, without recomputation: `published_blocks` tells why."""
    costs = _costs(
        replace(row, gpus=0, global_batch=0, pipeline=min(2, row.pipeline), iteration_ms=0), reached
    )
    return step_ms(PipelineSpec("1f1b", row.pipeline, row.chunks), costs, row.balance)


@cache
def _costs(row: Row, reached: Efficiency) -> LayerCosts:
    facts = gpt_facts(row.hidden, row.layers, row.heads, row.sequence, row.micro_batch)
    run = DeviceRun(DEVICES["a100"], "fp16", replicas=row.data_parallel, reached=reached)
    trained = [
        LayerUpdate(HALF * layer.parameters, HALF * layer.parameters, ADAM * layer.parameters)
        for layer in facts.layers
    ]
    # The head's matrix is the embedding's: only the first of the two updates it.
    tied = row.hidden * VOCABULARY
    if row.pipeline == 1:
        own = facts.layers[-1].parameters - tied
        trained[-1] = LayerUpdate(HALF * own, HALF * own, ADAM * own)
    return estimate_costs(facts, run, trained=trained, shared_bytes=HALF * tied)


@cache
def gpt_facts(
    hidden: int, layers: int, heads: int, sequence: int, rows: int, vocabulary: int = VOCABULARY
) -> ModelStats:
    with without_values():
        model = megatron_gpt.build(hidden, layers, heads, sequence, vocabulary)
    tokens = torch.zeros(rows, sequence, dtype=torch.long)
    return model_stats(model, Sample(tokens, tokens, megatron_gpt.loss))


@final
@dataclass(frozen=True)
class Errors:
    """Relative, without their signs."""

    mean: float
    nine_of_ten: float
    worst: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Errors:
        ordered = sorted(map(abs, errors))
        return cls(statistics.fmean(ordered), ordered[-(-9 * len(ordered) // 10) - 1], ordered[-1])

    def __str__(self) -> str:
        mean, nine, worst = (f"{100 * value:.1f} %" for value in (self.mean, self.nine_of_ten, self.worst))
        return f"mean {mean}, nine of ten within {nine}, worst {worst}"


def error(row: Row, reached: Efficiency = SHIPPED) -> float:
    return estimate(row, reached) / row.iteration_ms - 1


def fit(rows: Sequence[Row]) -> Efficiency:
    """The efficiencies with the least mean error, by changing one at a time."""

    def price(reached: Efficiency) -> float:
        return statistics.fmean(abs(error(row, reached)) for row in rows)

    best = Efficiency(unaligned=0.5, bandwidth=0.75, launch_ms=0.03)
    least = price(best)
    for factor in STEPS:
        improved = True
        while improved:
            improved = False
            for name in FITTED:
                for change in (factor, 1 / factor):
                    other = replace(best, **{name: getattr(best, name) * change})
                    if (now := price(other)) < least - 1e-6:
                        best, least, improved = other, now, True
    return best


def left_out(
    rows: Sequence[Row], part_of: Callable[[Row], object]
) -> list[tuple[object, Efficiency, list[float]]]:
    """For each part of the rows, a fit to all others and the errors of the part."""
    results = []
    for part in sorted({part_of(row) for row in rows}, key=str):
        reached = fit([row for row in rows if part_of(row) != part])
        results.append((part, reached, [error(row, reached) for row in rows if part_of(row) == part]))
    return results


def show(console: Console, path: Path = ROWS, *, fits: bool = True) -> None:
    rows = read_rows(path)
    console.print(f"\nIterations of GPT on A100s in fp16, {path.name}: estimated against published")
    groups: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for row in rows:
        groups[row.hidden, row.micro_batch, row.pipeline].append(error(row))
    table = Table("hidden", "micro-batch", "partitions", "rows", "errors from", "to", box=None)
    for (hidden, micro_batch, pipeline), errors in sorted(groups.items()):
        ends = (f"{100 * end:+.0f} %" for end in (min(errors), max(errors)))
        table.add_row(str(hidden), str(micro_batch), str(pipeline), str(len(errors)), *ends)
    console.print(table)
    console.print(f"{len(rows)} rows: {Errors.of(error(row) for row in rows)}")
    if fits:
        for what, part_of in (("size", lambda row: row.size), ("width", lambda row: row.hidden)):
            parts = left_out(rows, part_of)
            errors = [error for _, _, part in parts for error in part]
            console.print(f"fitted without the rows of one {what}, judged by them: {Errors.of(errors)}")
