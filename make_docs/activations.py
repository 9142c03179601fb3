"""The picture of activation memory: how many micro-batches a worker keeps at each moment of a step, per schedule."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from markupsafe import Markup

from gpipe_cli.schedule import Kind
from make_docs.schedules import EXAMPLES, Example
from make_docs.svg import label, svg_file, tag

NAMES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
LEFT, TOP, WIDTH, RIGHT = 128, 30, 860, 8
PANEL, GAP, PER_BATCH = 58, 16, 6.5
"""Heights; the last one is for a micro-batch."""


def draw_activations() -> str:
    longest = max(EXAMPLES[name].simulation().step for name in NAMES)
    scale = (WIDTH - LEFT - RIGHT) / longest
    peaks = {name: [peak(kept(EXAMPLES[name], worker)) for worker in (0, 3)] for name in NAMES}
    description = "Micro-batches kept by workers 0 and 3: " + "; ".join(
        f"{name} at most {first:g} and {last:g}" for name, (first, last) in peaks.items()
    )
    height = TOP + (PANEL + GAP) * len(NAMES)
    return svg_file(WIDTH, height, description, _elements(scale, peaks))


def kept(example: Example, worker: int) -> list[tuple[float, float]]:
    """Times, and how many micro-batches of the whole worker are kept from then on."""
    changes: list[tuple[float, float]] = []
    share = 1 / example.partitions_per_worker
    splits = example.schedule == "zero_bubble"
    for span in example.simulation().spans:
        if span.worker == worker and span.action.kind is Kind.FORWARD and span.phase == "forward":
            changes.append((span.begin, share))
        elif span.worker == worker and span.action.kind is (Kind.WEIGHT_GRAD if splits else Kind.BACKWARD):
            changes.append((span.end, -share))
    changes.sort()
    return list(zip((time for time, _ in changes), accumulate(change for _, change in changes), strict=True))


def peak(steps: list[tuple[float, float]]) -> float:
    return max(count for _, count in steps)


def _elements(scale: float, peaks: dict[str, list[float]]) -> Iterator[Markup]:
    yield label(
        "micro-batches whose activations a worker keeps: worker 0 filled, worker 3 as a line", LEFT, 15
    )
    for index, name in enumerate(NAMES):
        example = EXAMPLES[name]
        bottom = TOP + (PANEL + GAP) * index + PANEL
        end = LEFT + scale * example.simulation().step
        yield label(example.schedule, LEFT - 10, bottom - PANEL / 2, "end strong")
        yield label("at most {:g}, {:g}".format(*peaks[name]), LEFT - 10, bottom - PANEL / 2 + 16, "end")
        yield tag("path", {"class": "area", "d": _path(kept(example, 0), scale, bottom) + " Z"})
        yield tag("path", {"class": "skip", "d": _path(kept(example, 3), scale, bottom)})
        yield tag("path", {"class": "arrow", "d": f"M {LEFT} {bottom} H {end:.1f}"})


def _path(steps: list[tuple[float, float]], scale: float, bottom: float) -> str:
    parts = [f"M {LEFT} {bottom}"]
    for time, count in steps:
        parts.append(f"H {LEFT + scale * time:.1f} V {bottom - PER_BATCH * count:.1f}")
    return " ".join(parts)
