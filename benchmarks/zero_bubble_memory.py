"""Peaks of memory per GPU in Table 4 of the Zero Bubble paper (arXiv 2401.10241) beside the planner's estimate.

GPT with 16-bit parameters and gradients and Adam in 32 bits, 16 bytes per parameter; no recomputation. The first and
the last device have one layer less, as in the paper. What it calls GB is read as GiB, as torch reports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

from rich.console import Console
from rich.table import Table

from benchmarks.published_gpt import ADAM, HALF, gpt_facts
from benchmarks.zero_bubble import ROWS, SCHEDULES, Row
from gpipe_cli.profiling.memory import activation_bytes
from gpipe_cli.schedule.spec import PipelineSpec

GIB = 2**30
BYTES = 2 * HALF + ADAM
"""Of a parameter with its gradient and the optimizer's state."""


@final
@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    heads: int
    published: tuple[int, int, int]
    """GiB of the largest device under SCHEDULES; as ZB-1p has ZB-H1's memory, its figure is the last."""

    @property
    def row(self) -> Row:
        return next(row for row in ROWS if row.model == self.name)

    def estimate(self, schedule: str) -> float:
        row = self.row
        layers = row.devices * row.turns  # with the embedding and the head
        facts = gpt_facts(self.hidden, layers - 2, self.heads, 1024, row.samples)
        turns = row.turns if schedule == "interleaved" else 1
        balance = [row.turns // turns] * (row.devices * turns)
        spec = PipelineSpec(schedule, len(balance), row.chunks, "never", row.devices)
        resident = [
            BYTES * sum(layer.parameters for layer in facts.layers[begin:end])
            for begin, end in pairwise([0, *accumulate(balance)])
        ]
        bytes = [sum(pair) for pair in zip(resident, activation_bytes(facts, balance, spec), strict=True)]
        return max(sum(bytes[device :: row.devices]) for device in range(row.devices)) / GIB


MODELS = (
    Model("1.5B", 2304, 24, (30, 40, 32)),
    Model("6.2B", 4096, 32, (39, 48, 42)),
    Model("14.6B", 5120, 40, (32, 39, 33)),
    Model("28.3B", 6144, 48, (43, 58, 44)),
)


@final
@dataclass(frozen=True)
class Comparison:
    model: str
    schedule: str
    published: float
    estimated: float

    @property
    def difference(self) -> float:
        return self.estimated / self.published - 1


def comparisons() -> Iterator[Comparison]:
    for model in MODELS:
        for schedule, published in zip(SCHEDULES, model.published, strict=True):
            yield Comparison(model.name, schedule, published, model.estimate(schedule))


def show(console: Console) -> None:
    console.print("\nThe Zero Bubble paper's peaks of memory per GPU in GiB")
    table = Table("model", "schedule", "published", "estimated", "difference", box=None)
    for each in comparisons():
        table.add_row(
            each.model,
            each.schedule,
            f"{each.published:.0f}",
            f"{each.estimated:.1f}",
            f"{100 * each.difference:+.0f} %",
        )
    console.print(table)
    console.print(
        "gpipe's interleaved order keeps more micro-batches than Megatron's, to leave time for transfers"
    )
