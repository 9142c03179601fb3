"""Diagrams of schedules, drawn from the action lists that the pipeline runs: a row per worker, time from left to right.

The costs are made up (a backward takes twice as long as a forward, a transfer takes no time), so the diagrams show the
order alone. The simulator decides when each action begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from markupsafe import Markup

from gpipe_cli.schedule import Kind, order
from gpipe_cli.schedule.simulate import PartitionCost, Simulation, Span, simulate
from make_docs.svg import box, label, legend, svg_file

FORWARD, BACKWARD = 1.0, 2.0
"""Time of a worker's whole share of the model, for one micro-batch."""
LEFT, TOP, RIGHT = 64, 28, 8
ROW, BAR = 30, 24
WIDTH = 860
"""Width of the longest diagram; the others use the same scale."""
GAP = 0.6
"""Separates neighbouring bars."""
LETTER = 8


@final
@dataclass(frozen=True)
class Example:
    schedule: str
    workers: int = 4
    partitions_per_worker: int = 1
    chunks: int = 8
    recomputes: bool = False

    @property
    def partitions(self) -> int:
        return self.workers * self.partitions_per_worker

    def simulation(self) -> Simulation:
        share = 1 / self.partitions_per_worker
        # A split backward takes as long as a whole one here, half for each part.
        cost = PartitionCost(FORWARD * share, BACKWARD * share, recompute=FORWARD * share)
        actions = order(self.schedule, self.partitions, self.chunks, self.workers)
        return simulate(
            actions,
            [cost] * self.partitions,
            checkpointed_counts=[self.chunks if self.recomputes else 0] * self.partitions,
        )

    @property
    def title(self) -> str:
        each = f", {self.partitions_per_worker} partitions each" if self.partitions_per_worker > 1 else ""
        checkpoint = ", checkpoint=always" if self.recomputes else ""
        batches = "micro-batch" if self.chunks == 1 else "micro-batches"
        return f"{self.schedule}{checkpoint}: {self.workers} workers{each}, {self.chunks} {batches}"


EXAMPLES = {
    "one-micro-batch": Example("gpipe", chunks=1),
    "gpipe": Example("gpipe"),
    "gpipe-always": Example("gpipe", recomputes=True),
    "1f1b": Example("1f1b"),
    "interleaved": Example("interleaved", partitions_per_worker=2),
    "zero-bubble": Example("zero_bubble"),
}


def draw(example: Example) -> str:
    simulation = example.simulation()
    longest = max(example.simulation().step for example in EXAMPLES.values())
    scale = (WIDTH - LEFT - RIGHT) / longest
    description = f"{example.title}; idle {simulation.bubble:.0%} of the time"
    height = TOP + ROW * example.workers
    return svg_file(WIDTH, height, description, _elements(example, simulation, scale))


def _elements(example: Example, simulation: Simulation, scale: float) -> Iterator[Markup]:
    yield label(f"{example.title}; idle {simulation.bubble:.0%}", LEFT, 15, "strong")
    yield from legend((_css_class(span, example.workers) for span in simulation.spans), WIDTH - RIGHT)
    for worker in range(example.workers):
        y = TOP + ROW * worker
        yield label(f"worker {worker}", LEFT - 8, y + BAR / 2 + 4, "end")
        yield box("idle", LEFT, y, scale * simulation.step, BAR)
    for span in simulation.spans:
        x, width = LEFT + scale * span.begin, scale * (span.end - span.begin) - GAP
        letter = "R" if span.phase == "recompute" else span.action.kind.value
        name = f"{letter}{span.action.micro_batch}"
        # A narrow bar shows the micro-batch only: its color stands for the letter.
        text = name if width >= LETTER * len(name) else name[1:]
        yield box(_css_class(span, example.workers), x, TOP + ROW * span.worker, width, BAR, text, radius=2)


def _css_class(span: Span, workers: int) -> str:
    """The color: by phase and, where a worker has several partitions, by which of them."""
    if span.phase == "recompute":
        return "recompute"
    if span.action.kind is Kind.WEIGHT_GRAD:
        return "weights"
    return f"{span.phase}{span.action.partition // workers or ''}"
