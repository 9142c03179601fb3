"""Published steps of GPT-2 on 16 T4s beside the planner's estimate: nothing was fitted to them."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import final

from rich.console import Console
from rich.table import Table

from benchmarks.published_gpt import ADAM, HALF, Errors, gpt_facts
from gpipe_cli.plan.device_table import DEVICES, DeviceSpec
from gpipe_cli.plan.estimated import DeviceRun, LayerUpdate, estimate_costs
from gpipe_cli.plan.step_time import step_ms
from gpipe_cli.profiling.model_stats import ModelStats
from gpipe_cli.schedule.spec import PipelineSpec

ROWS = Path(__file__).parent / "data" / "t4_gpt2_steps.csv"
HIDDEN, BLOCKS, HEADS, SEQUENCE, VOCABULARY, MINI_BATCH = 1024, 24, 16, 1024, 52_256, 32
T4 = DEVICES["t4"]
BY_DATA_SHEET = replace(T4, sustained=None)


@final
@dataclass(frozen=True)
class Step:
    micro_batch: int
    data_parallel: int
    blocks: tuple[int, ...]
    """Of each partition."""
    published_ms: float

    def estimate(self, device: DeviceSpec = T4) -> float:
        """Milliseconds. Replicas of a partition share a machine, so that every boundary is between two."""
        facts = _facts(self.micro_batch)
        updates = [_update(layer.parameters) for layer in facts.layers]
        tied = HIDDEN * VOCABULARY
        if len(self.blocks) == 1:  # the head's matrix is the embedding's, which has its update already
            updates[-1] = _update(facts.layers[-1].parameters - tied)
        run = DeviceRun(
            replace(device, link=device.network),
            "fp16",
            replicas=self.data_parallel,
            spans_machines=self.data_parallel > device.per_machine,
            leaves_machine=True,
        )
        costs = estimate_costs(facts, run, trained=updates, shared_bytes=HALF * tied)
        # The embedding is with the first blocks and the head with the last.
        balance = list(self.blocks)
        balance[0] += 1
        balance[-1] += 1
        chunks = MINI_BATCH // (self.data_parallel * self.micro_batch)
        return step_ms(PipelineSpec("1f1b", len(balance), chunks), costs, balance)

    def error(self, device: DeviceSpec = T4) -> float:
        return self.estimate(device) / self.published_ms - 1


def steps() -> list[Step]:
    with ROWS.open(encoding="utf-8", newline="") as file:
        return [
            Step(
                int(row["micro_batch"]),
                int(row["data_parallel"]),
                tuple(map(int, row["blocks"].split())),
                1000 * float(row["step_seconds"]),
            )
            for row in csv.DictReader(file)
        ]


@cache
def _facts(rows: int) -> ModelStats:
    return gpt_facts(HIDDEN, BLOCKS, HEADS, SEQUENCE, rows, VOCABULARY)


def _update(parameters: int) -> LayerUpdate:
    return LayerUpdate(HALF * parameters, HALF * parameters, ADAM * parameters)


def show(console: Console) -> None:
    console.print("\nSteps of GPT-2 on 16 T4s in fp16: estimated against published")
    table = Table("micro-batch", "replicas", "partitions", "published ms", "estimated ms", "error", box=None)
    for step in steps():
        sizes = (step.micro_batch, step.data_parallel, len(step.blocks))
        times = (f"{step.published_ms:.0f}", f"{step.estimate():.0f}", f"{100 * step.error():+.0f} %")
        table.add_row(*map(str, sizes), *times)
    console.print(table)
    for name, device in (("sustained", T4), ("data sheet", BY_DATA_SHEET)):
        console.print(f"{name}: {Errors.of(step.error(device) for step in steps())}")
