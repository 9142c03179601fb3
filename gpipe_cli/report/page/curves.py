"""Curves over the steps of training: one chart per quantity, the same quantity of several runs in one.

Lines stretch with the page, texts do not: a phone shows as much as a wide screen. `script.js` shows the values
under the pointer from `data-hover`: places from left to right, each with its text.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from gpipe_cli.report.numbers import readable
from gpipe_cli.report.page.facts import Curve, Run
from gpipe_cli.report.page.html import Html, join, tag
from gpipe_cli.report.page.scale import Scale

__all__ = ["charts"]

FIRST = ("loss", "top1", "accuracy", "mean_iou", "lr", "samples_per_second")
"""Quantities that everybody looks for, in this order; others follow by name."""
TITLES = {"samples_per_second": "samples per second", "lr": "learning rate", "top1": "top-1", "top5": "top-5"}
OF_TRAINING = ("lr", "samples_per_second")
"""Quantities that say nothing new, or nothing comparable, of an evaluation."""
MOST_POINTS = 600
FINE = 1000
"""The grid that lines are drawn on."""


@final
@dataclass(frozen=True)
class Line:
    name: str
    colour: int
    dashed: bool
    points: Sequence[tuple[float, float]]


def charts(runs: Sequence[Run]) -> Html | None:
    """None where nothing was trained."""
    lines: dict[str, list[Line]] = defaultdict(list)
    for index, run in enumerate(runs):
        for curve in run.curves:
            if curve.split != "eval" or curve.quantity not in OF_TRAINING:
                lines[curve.quantity].append(_line(curve, run, index if len(runs) > 1 else None))
    if not lines:
        return None
    order = sorted(lines, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    return tag("div", {"class": "charts"}, *(_chart(name, lines[name]) for name in order))


def _line(curve: Curve, run: Run, index: int | None) -> Line:
    """A colour per run where there are several, else per split; an evaluation is dashed in any case."""
    evaluated = curve.split == "eval"
    name = curve.split if index is None else f"{run.path.name} {curve.split}"
    return Line(name, int(evaluated) if index is None else index, evaluated, thinned(curve.points))


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Few enough to draw: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    stretch = -(-2 * len(points) // MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), stretch):
        part = points[begin : begin + stretch]
        kept += sorted({min(part, key=_value), max(part, key=_value)})
    return [*kept, points[-1]] if kept[-1] != points[-1] else kept


def _value(point: tuple[float, float]) -> float:
    return point[1]


def _chart(quantity: str, lines: Sequence[Line]) -> Html:
    across = Scale.over(step for line in lines for step, _ in line.points)
    up = Scale.over((value for line in lines for _, value in line.points), margin=0.06)
    title = TITLES.get(quantity, quantity.replace("_", " "))
    return tag(
        "figure",
        {"class": "chart"},
        tag("figcaption", None, tag("strong", None, title), " ", _legend(lines)),
        tag(
            "div",
            {"class": "plot", "data-hover": json.dumps(_hover(quantity, lines, across))},
            _upward_axis(quantity, up),
            tag("svg", {"class": "area", "role": "img", "aria-label": title}, *_drawing(lines, across, up)),
            _across_axis(across),
        ),
    )


def _legend(lines: Sequence[Line]) -> Html:
    return join(
        tag(
            "span",
            {"class": "key"},
            tag(
                "svg",
                {"class": "swatch"},
                tag("line", {"class": _class(line), "x2": "100%", "y1": 5, "y2": 5}),
            ),
            line.name,
        )
        for line in lines
    )


def _drawing(lines: Sequence[Line], across: Scale, up: Scale) -> list[Html]:
    grid = [
        tag("line", {"class": "grid", "x2": "100%", "y1": height, "y2": height})
        for height in (f"{100 * (1 - up.share(mark)):.2f}%" for mark in up.marks())
    ]
    drawn = [
        tag("polyline", {"class": _class(line), "points": " ".join(f"{x:.0f},{y:.0f}" for x, y in places)})
        for line in lines
        if (places := [(FINE * across.share(x), FINE * (1 - up.share(y))) for x, y in line.points])
    ]
    stretched = tag("svg", {"viewBox": f"0 0 {FINE} {FINE}", "preserveAspectRatio": "none"}, *drawn)
    dots = [_dot(line, across.share(x), 1 - up.share(y)) for line in lines for x, y in _dotted(line)]
    cross = tag("line", {"class": "cross", "y2": "100%", "visibility": "hidden"})
    return [*grid, stretched, *dots, cross]


def _dotted(line: Line) -> Sequence[tuple[float, float]]:
    """Few points are shown as such: a single one would have no line at all."""
    return line.points if len(line.points) <= 40 else ()


def _dot(line: Line, across: float, down: float) -> Html:
    place = {"cx": f"{100 * across:.2f}%", "cy": f"{100 * down:.2f}%"}
    return tag("circle", {"class": f"c{line.colour % 8}", **place, "r": 2.5})


def _class(line: Line) -> str:
    return f"line c{line.colour % 8}{' dashed' if line.dashed else ''}"


def _upward_axis(quantity: str, up: Scale) -> Html:
    return tag(
        "svg",
        {"class": "up"},
        *(
            tag("text", {"x": "100%", "y": f"{100 * (1 - up.share(mark)):.2f}%"}, _short(quantity, mark))
            for mark in up.marks()
        ),
    )


def _across_axis(across: Scale) -> Html:
    marks = [mark for mark in across.marks() if mark == round(mark)]
    return tag(
        "svg",
        {"class": "across"},
        *(tag("text", {"x": f"{100 * across.share(mark):.2f}%", "y": 14}, f"{mark:.0f}") for mark in marks),
    )


def _short(quantity: str, value: float) -> str:
    """For an axis: round numbers need no more digits than they have."""
    shown = readable(quantity, value)
    return f"{100 * value:.4g} %" if shown.endswith("%") else f"{value:.6g}"


def _hover(quantity: str, lines: Sequence[Line], across: Scale) -> list[tuple[float, str]]:
    texts: dict[float, list[str]] = defaultdict(list)
    for line in lines:
        for step, value in line.points:
            texts[step].append(f"{line.name} {readable(quantity, value)}")
    return [
        (round(across.share(step), 4), "\n".join([f"step {step:.0f}", *texts[step]]))
        for step in sorted(texts)
    ]
