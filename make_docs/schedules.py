"""Pictures of schedules: a row per worker, time from left to right, from the action lists that the pipeline executes.

The simulator decides when an action begins. Its costs are made up (a backward takes twice as long as a forward, a
transfer no time), so the pictures show only the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from gpipe_cli.report.page.html import Html
from gpipe_cli.schedule import Action, Kind, order
from gpipe_cli.schedule.simulate import PartitionCost, Simulation, Span, simulate
from make_docs.svg import box, frame, label

FORWARD, BACKWARD = 1.0, 2.0
"""Cost of one worker's share of the model for one micro-batch."""
LEFT, TOP, RIGHT = 64, 28, 8
ROW, BAR = 30, 24
WIDTH = 860
"""Of the longest picture; all are drawn to its scale."""
GAP = 0.6
"""Between neighbouring bars."""
LETTER = 8
LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "weights": "weight gradients",
}


@final
@dataclass(frozen=True)
class ScheduleExample:
    schedule: str
    workers: int = 4
    partitions_each: int = 1
    chunks: int = 8
    recomputes: bool = False

    @property
    def partitions(self) -> int:
        return self.workers * self.partitions_each

    def simulation(self) -> Simulation:
        share = 1 / self.partitions_each
        # A split backward takes as long as a whole one, half for each part.
        cost = PartitionCost(FORWARD * share, BACKWARD * share, recompute=FORWARD * share)
        actions = order(self.schedule, self.partitions, self.chunks, self.workers)
        return simulate(
            actions,
            [cost] * self.partitions,
            checkpoint_stops=[self.chunks if self.recomputes else 0] * self.partitions,
        )

    @property
    def description(self) -> str:
        each = f", {self.partitions_each} partitions each" if self.partitions_each > 1 else ""
        recomputed = ", checkpoint=always" if self.recomputes else ""
        batches = "micro-batch" if self.chunks == 1 else "micro-batches"
        return f"{self.schedule}{recomputed}: {self.workers} workers{each}, {self.chunks} {batches}"


PICTURES = {
    "one-micro-batch": ScheduleExample("gpipe", chunks=1),
    "gpipe": ScheduleExample("gpipe"),
    "gpipe-always": ScheduleExample("gpipe", recomputes=True),
    "1f1b": ScheduleExample("1f1b"),
    "interleaved": ScheduleExample("interleaved", partitions_each=2),
    "zero-bubble": ScheduleExample("zero_bubble"),
}


def picture(example: ScheduleExample) -> str:
    simulation = example.simulation()
    longest = max(other.simulation().step for other in PICTURES.values())
    unit = (WIDTH - LEFT - RIGHT) / longest
    alternative = f"{example.description}; the workers are idle {simulation.bubble:.0%} of the time"
    height = TOP + ROW * example.workers
    return frame(WIDTH, height, alternative, _elements(example, simulation, unit))


def _elements(example: ScheduleExample, simulation: Simulation, unit: float) -> Iterator[Html]:
    yield label(f"{example.description}; idle {simulation.bubble:.0%}", LEFT, 15, "strong")
    yield from _legend({_kind(span, example.workers) for span in simulation.spans})
    for worker in range(example.workers):
        y = TOP + ROW * worker
        yield label(f"worker {worker}", LEFT - 8, y + BAR / 2 + 4, "end")
        yield box("idle", LEFT, y, unit * simulation.step, BAR)
    for span in simulation.spans:
        yield _bar(span, example.workers, unit)


def _legend(kinds: set[str]) -> Iterator[Html]:
    entries = {kind: meaning for kind, meaning in LEGEND.items() if kind in kinds}
    x = float(WIDTH - RIGHT - sum(_entry_width(meaning) for meaning in entries.values()))
    for kind, meaning in entries.items():
        yield box(kind, x, 5, 11, 11, round=2)
        yield label(meaning, x + 16, 15)
        x += _entry_width(meaning)


def _entry_width(meaning: str) -> int:
    """Approximately."""
    return 6 * len(meaning) + 36


def _bar(span: Span, workers: int, unit: float) -> Html:
    width = unit * (span.end - span.begin) - GAP
    name = f"{_letter(span)}{span.action.micro_batch}"
    geometry = (LEFT + unit * span.begin, TOP + ROW * span.worker, width, BAR)
    # Without room for the letter, the colour tells the kind.
    return box(_kind(span, workers), *geometry, name if width >= LETTER * len(name) else name[1:], round=2)


def _letter(span: Span) -> str:
    return "R" if span.phase == "recompute" else span.action.kind.value


def _kind(span: Span, workers: int) -> str:
    """The CSS class: by the kind of action and, if a worker has several partitions, by which of them."""
    if span.phase == "recompute":
        return "recompute"
    if span.action.kind is Kind.WEIGHT_GRAD:
        return "weights"
    return f"{span.phase}{_turn(span.action, workers) or ''}"


def _turn(action: Action, workers: int) -> int:
    return action.partition // workers
