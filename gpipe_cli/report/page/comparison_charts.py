"""The charts of a comparison: one per metric and split, with a line per run and one legend for all of them.

A run that is much worse must not flatten the others: such a chart has a logarithmic scale, or cuts off the values of a
run that diverged, and says so.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from gpipe_cli.report.colors import CURVES
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.page.charts import (
    DASHES,
    TINY,
    TRAINING_ONLY,
    Axis,
    ChartLine,
    Scale,
    draw_chart,
    metric_order,
    metric_title,
    swatch,
)
from gpipe_cli.report.page.curves import CurvePoint
from gpipe_cli.report.page.html import Html, join, tag
from gpipe_cli.report.page.run_facts import RunFacts

SPLITS = {"train": "training", "eval": "evaluation"}
FLAT = 0.1
"""A usual run that takes less than this share of the height is flattened by another."""
FAR_ABOVE = 30
"""A run that reaches so many times the height of a usual run has diverged, and is cut off."""
HEADROOM = 0.15
"""The share of the height above the other runs in which a run that is cut off leaves the chart."""
MARGIN = 0.06
DECADE_MARKS = (1, 2, 5)
FEW_DECADES = 3


@final
@dataclass(frozen=True)
class LogScale:
    """Like Scale, for positive numbers that differ by orders of magnitude."""

    low: float
    high: float

    def share(self, value: float) -> float:
        return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))

    def ticks(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        marks = DECADE_MARKS if last - first <= FEW_DECADES else DECADE_MARKS[:1]
        apart = max(1, (last - first) // 6)
        values = [mark * 10.0**power for power in range(first, last + 1, apart) for mark in marks]
        return [value for value in values if self.low <= value <= self.high]


def run_line(index: int, name: str, points: Sequence[CurvePoint] = (), *, bold: bool = False) -> ChartLine:
    """The line of a run by its position in the comparison: colors first, then other strokes with the same colors."""
    return ChartLine(name, index, index // len(CURVES) % len(DASHES), points, run=index, bold=bold)


def comparison_charts(runs: Sequence[RunFacts], names: Sequence[str], best: int | None) -> Html | None:
    """None if no run has metrics; best: the run whose lines are bold."""
    lines: dict[tuple[str, str], list[ChartLine]] = defaultdict(list)
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        for curve in run.curves:
            if curve.split != "eval" or curve.metric not in TRAINING_ONLY:
                points = [point._replace(low=point.mean, high=point.mean) for point in curve.points]
                lines[curve.metric, curve.split].append(run_line(index, name, points, bold=index == best))
    if not lines:
        return None
    order = sorted(lines, key=lambda key: (*metric_order(key[0]), key[1]))
    charts = (_chart(*key, lines[key]) for key in order)
    return join([_legend(names, best), tag("div", {"class": "charts"}, *charts)])


def _legend(names: Sequence[str], best: int | None) -> Html:
    keys = [
        tag(
            "button",
            {"class": "key", "type": "button", "data-run": str(index), "aria-pressed": "false"},
            swatch(run_line(index, name, bold=index == best)),
            name,
        )
        for index, name in enumerate(names)
    ]
    return tag(
        "div",
        {"class": "runs-legend"},
        tag("p", None, "Best first. Point at a run to see its curves alone; click to keep it."),
        *keys,
    )


def _chart(metric: str, split: str, lines: Sequence[ChartLine]) -> Html:
    points = [point for line in lines for point in line.points]
    horizontal = Scale.over(point.step for point in points)
    vertical, limit = _vertical_scale(metric, lines)
    cut = sum(any(point.mean > limit for point in line.points) for line in lines)
    notes = ["logarithmic scale"] if isinstance(vertical, LogScale) else []
    if cut:
        notes.append(f"values above {limit:.3g} are cut off ({cut} run{'s' if cut > 1 else ''})")
    title = f"{metric_title(metric)}, {SPLITS.get(split, split)}"
    note = tag("span", {"class": "scale-note"}, "; ".join(notes)) if notes else None
    caption = join([tag("strong", None, title), " ", note])
    drawn = [
        replace(line, points=[point._replace(mean=min(point.mean, limit)) for point in line.points])
        for line in lines
    ]
    return draw_chart(metric, title, drawn, horizontal, vertical, caption, _hover(metric, lines, horizontal))


def _vertical_scale(metric: str, lines: Sequence[ChartLine]) -> tuple[Axis, float]:
    """The scale of a chart, and the value above which it cuts off."""
    values = [point.mean for line in lines for point in line.points]
    if format_value(metric, 1.0).endswith("%"):  # between 0 and 1
        return Scale.over(values, margin=MARGIN), math.inf
    low, highs = min(values), sorted(max(point.mean for point in line.points) for line in lines)
    # Several runs may have diverged, so a usual run is one of the lower quarter.
    usual = highs[(len(highs) - 1) // 4]
    span = max(usual - low, FLAT * abs(usual))
    high = max(value for value in highs if value <= low + FAR_ABOVE * span)
    limit = high + HEADROOM * (high - low) if high < highs[-1] else math.inf
    top = min(limit, highs[-1])
    if low < TINY or span >= FLAT * (top - low):
        return Scale.over([low, top], margin=MARGIN), limit
    margin = math.exp(MARGIN * (math.log(top) - math.log(low)))
    return LogScale(low / margin, top * margin), limit


def _hover(metric: str, lines: Sequence[ChartLine], horizontal: Scale) -> str:
    """JSON: positions from left to right, each with its title and the values of the runs, best run first."""
    texts: dict[float, list[tuple[str, str]]] = defaultdict(list)
    for line in lines:
        for point in line.points:
            texts[point.step].append((str(line.run), format_value(metric, point.mean)))
    return json.dumps(
        [[round(horizontal.share(step), 4), f"step {step:.0f}", texts[step]] for step in sorted(texts)]
    )
