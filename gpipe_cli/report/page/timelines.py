"""The timeline of a step: a row per partition, one bar per piece of work, the ideal above what was measured.

Both to the same scale. A bar is as wide as its time, has a label where there is room for it, and shows its text when it
is pointed at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from gpipe_cli.report.numbers import readable
from gpipe_cli.report.page.facts import Piece, Run, Timeline
from gpipe_cli.report.page.html import Html, join, tag
from gpipe_cli.report.page.scale import Scale

__all__ = ["timelines"]

PHASES = ("forward", "recompute", "backward", "copy")
ROW = 26
BAR = 22
AXIS = 20
LEAST_WIDTH = 900
WIDTH_OF_A_BAR = 14
"""Pixels that the average bar gets at least: the picture scrolls where the screen is narrower than that."""
WIDTH_OF_A_LETTER = 7
"""Half a label is no label."""


def timelines(run: Run) -> Html | None:
    """None where no step was recorded."""
    if run.measured is None:
        return None
    shown = {"ideal": run.ideal, "measured": run.measured}
    known = {title: one for title, one in shown.items() if one is not None}
    longest = max(one.milliseconds for one in known.values()) or 1.0
    width = max(LEAST_WIDTH, WIDTH_OF_A_BAR * max(map(_busiest, known.values())))
    pictures = [_picture(title, one, Scale(0, longest), width) for title, one in known.items()]
    legend = tag("p", {"class": "legend"}, *(_key(phase) for phase in PHASES))
    return join([legend, *pictures, *_advice(run.advice)])


def _advice(advice: Sequence[str]) -> Iterator[Html]:
    if advice:
        yield tag("p", None, tag("strong", None, "To try: "), "; ".join(advice), ".")


def _key(phase: str) -> Html:
    swatch = tag("svg", {"class": "swatch"}, tag("rect", {"class": phase, "width": "100%", "height": 10}))
    return tag("span", {"class": "key"}, swatch, phase)


def _busiest(timeline: Timeline) -> int:
    """The most bars that a row has."""
    return max(Counter(piece.partition for piece in timeline.pieces).values())


def _picture(title: str, timeline: Timeline, scale: Scale, width: int) -> Html:
    """`width`: pixels it has at least."""
    height = ROW * timeline.partitions
    bubble = "" if timeline.bubble is None else f", bubble {readable('bubble', timeline.bubble)}"
    names = (
        tag("text", {"x": "100%", "y": ROW * index + BAR / 2}, str(index))
        for index in range(timeline.partitions)
    )
    area = tag(
        "svg",
        {"class": "bars", "width": width, "height": height + AXIS},
        *_marks(scale, height),
        *(_bar(piece, scale, width) for piece in timeline.pieces),
    )
    return tag(
        "figure",
        {"class": f"timeline {title}"},
        tag("figcaption", None, tag("strong", None, title), f" {timeline.milliseconds:.1f} ms{bubble}"),
        tag(
            "div",
            {"class": "rows"},
            tag("svg", {"class": "names", "height": height + AXIS}, *names),
            tag("div", {"class": "scroll", "tabindex": "0"}, area),
        ),
    )


def _bar(piece: Piece, scale: Scale, width: int) -> Html:
    phase = piece.phase if piece.phase in PHASES else "copy"
    told = (
        f"{piece.label}: {piece.phase}\npartition {piece.partition}, micro-batch {piece.micro_batch}\n"
        f"{piece.milliseconds:.3f} ms, from {piece.begin:.3f} ms"
    )
    place: dict[str, str | float] = {
        "x": f"{100 * scale.share(piece.begin):.3f}%",
        "width": f"{100 * scale.share(piece.milliseconds):.3f}%",
        "y": ROW * piece.partition,
        "height": BAR,
    }
    room = width * scale.share(piece.milliseconds) > WIDTH_OF_A_LETTER * len(piece.label)
    label = tag("text", {"x": "50%", "y": "50%"}, piece.label) if room else None
    return tag(
        "svg",
        {"class": "piece", **place},
        tag("title", None, told),
        tag("rect", {"class": phase, "width": "100%", "height": "100%"}),
        label,
    )


def _marks(scale: Scale, height: float) -> Iterator[Html]:
    for mark in scale.marks():
        at = f"{100 * scale.share(mark):.2f}%"
        yield tag("line", {"class": "grid", "x1": at, "x2": at, "y2": height})
        if mark:  # where all begin is plain
            yield tag("text", {"class": "mark", "x": at, "y": height + 14}, f"{mark:.6g} ms")
