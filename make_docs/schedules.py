"""Pictures of schedules: a row per worker, time from left to right, made of the lists that the pipeline itself walks.

The costs are made up (a backward takes twice as long as a forward, a transfer nothing), so the pictures show the order
alone. When an action begins is the simulator's word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from gpipe_cli.report.page.html import Html
from gpipe_cli.schedule import Action, Kind, order
from gpipe_cli.schedule.simulate import PartitionCost, Simulation, Span, simulate
from make_docs.svg import box, frame, label

__all__ = ["PICTURES", "Shown", "picture"]

FORWARD, BACKWARD = 1.0, 2.0
"""Of all that one worker has of the model, for one micro-batch."""
LEFT, TOP, RIGHT = 64, 28, 8
ROW, BAR = 30, 24
WIDTH = 860
"""Of the longest picture, which all are drawn to the scale of."""
GAP = 0.6
"""Neighbours are told apart by it."""
LETTER = 8
MEANINGS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "weights": "weight gradients",
}


@final
@dataclass(frozen=True)
class Shown:
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
        # A split backward here takes as long as a whole one, half for each part.
        cost = PartitionCost(FORWARD * share, BACKWARD * share, recompute=FORWARD * share)
        actions = order(self.schedule, self.partitions, self.chunks, self.workers)
        return simulate(
            actions,
            [cost] * self.partitions,
            checkpoint_stops=[self.chunks if self.recomputes else 0] * self.partitions,
        )

    @property
    def words(self) -> str:
        each = f", {self.partitions_each} partitions each" if self.partitions_each > 1 else ""
        recomputed = ", checkpoint=always" if self.recomputes else ""
        batches = "micro-batch" if self.chunks == 1 else "micro-batches"
        return f"{self.schedule}{recomputed}: {self.workers} workers{each}, {self.chunks} {batches}"


PICTURES = {
    "one-micro-batch": Shown("gpipe", chunks=1),
    "gpipe": Shown("gpipe"),
    "gpipe-always": Shown("gpipe", recomputes=True),
    "1f1b": Shown("1f1b"),
    "interleaved": Shown("interleaved", partitions_each=2),
    "zero-bubble": Shown("zero_bubble"),
}


def picture(shown: Shown) -> str:
    simulation = shown.simulation()
    longest = max(one.simulation().step for one in PICTURES.values())
    unit = (WIDTH - LEFT - RIGHT) / longest
    told = f"{shown.words}; {simulation.bubble:.0%} of the time nothing is done"
    height = TOP + ROW * shown.workers
    return frame(WIDTH, height, told, _parts(shown, simulation, unit))


def _parts(shown: Shown, simulation: Simulation, unit: float) -> Iterator[Html]:
    yield label(f"{shown.words}; idle {simulation.bubble:.0%}", LEFT, 15, "strong")
    yield from _legend({_kind(span, shown.workers) for span in simulation.spans})
    for worker in range(shown.workers):
        y = TOP + ROW * worker
        yield label(f"worker {worker}", LEFT - 8, y + BAR / 2 + 4, "end")
        yield box("idle", LEFT, y, unit * simulation.step, BAR)
    for span in simulation.spans:
        yield _bar(span, shown.workers, unit)


def _legend(kinds: set[str]) -> Iterator[Html]:
    known = {kind: meaning for kind, meaning in MEANINGS.items() if kind in kinds}
    x = float(WIDTH - RIGHT - sum(_room(meaning) for meaning in known.values()))
    for kind, meaning in known.items():
        yield box(kind, x, 5, 11, 11, round=2)
        yield label(meaning, x + 16, 15)
        x += _room(meaning)


def _room(meaning: str) -> int:
    """What an entry of the legend takes, about."""
    return 6 * len(meaning) + 36


def _bar(span: Span, workers: int, unit: float) -> Html:
    width = unit * (span.end - span.begin) - GAP
    name = f"{_letter(span)}{span.action.micro_batch}"
    place = (LEFT + unit * span.begin, TOP + ROW * span.worker, width, BAR)
    # Colours tell the rest where there is no room for it.
    return box(_kind(span, workers), *place, name if width >= LETTER * len(name) else name[1:], round=2)


def _letter(span: Span) -> str:
    return "R" if span.phase == "recompute" else span.action.kind.value


def _kind(span: Span, workers: int) -> str:
    """The colour: by what is done and, where a worker has several partitions, by which of them."""
    if span.phase == "recompute":
        return "recompute"
    if span.action.kind is Kind.WEIGHT_GRAD:
        return "weights"
    return f"{span.phase}{_turn(span.action, workers) or ''}"


def _turn(action: Action, workers: int) -> int:
    return action.partition // workers
