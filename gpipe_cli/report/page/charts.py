"""The charts of a report: metrics over the steps of training.

Lines stretch with the page, texts do not, so a phone shows as much as a wide screen. `script.js` shows the values under
the pointer from the attribute `data-hover`: positions from left to right, each with its text.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from gpipe_cli.report.colors import curve_class
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.page.curves import CurvePoint
from gpipe_cli.report.page.html import Html, join, tag
from gpipe_cli.report.page.run_facts import RunFacts

FIRST_METRICS = ("loss", "top1", "accuracy", "mean_iou", "lr", "samples_per_second")
"""The order of charts; other metrics follow by name."""
TITLES = {"samples_per_second": "samples per second", "lr": "learning rate", "top1": "top-1", "top5": "top-5"}
TRAINING_ONLY = ("lr", "samples_per_second")
"""Metrics that say nothing new, or nothing comparable, about an evaluation."""
MAX_DOTS = 80
"""In one chart; more would hide its lines."""
DASHES = ("", " dashed", " dotted")
"""CSS classes of the kinds of strokes."""
GRID_SIZE = 1000
"""Lines are drawn on a square of this side, which the browser stretches."""
TICKS = 5
"""About how many fit on an axis."""
EQUAL = 1e-9
"""Values that differ by less than this share count as one value; the arithmetic of ticks could not part them."""
TINY = 1e-200


@final
@dataclass(frozen=True)
class Scale:
    """Maps numbers to positions on an axis, as shares of its length."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float], *, margin: float = 0.0) -> Scale:
        """A scale for all the values with a margin at both ends; a single value gets half its size on either side."""
        numbers = list(values)
        low, high = min(numbers), max(numbers)
        size = max(abs(low), abs(high))
        if high - low <= EQUAL * size or size < TINY:
            padding = 0.5 * size if size >= TINY else 0.5
        else:
            padding = margin * (high - low)
        return cls(low - padding, high + padding)

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Multiples of 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        first, last = math.ceil(self.low / distance), math.floor(self.high / distance)
        return [distance * index for index in range(first, last + 1)]


class Axis(Protocol):
    def share(self, value: float) -> float:
        """The position of a value, as a share of the axis."""

    def ticks(self) -> list[float]: ...


@final
@dataclass(frozen=True)
class ChartLine:
    name: str
    color: int
    dash: int
    """The kind of stroke, an index of `DASHES`."""
    points: Sequence[CurvePoint]
    run: int | None = None
    """Which of several runs it belongs to."""
    bold: bool = False

    @property
    def has_range(self) -> bool:
        return any(point.low < point.high for point in self.points)

    @property
    def css_class(self) -> str:
        return f"line {curve_class(self.color)}{DASHES[self.dash]}{' bold' if self.bold else ''}"

    @property
    def band_class(self) -> str:
        return f"band {curve_class(self.color)}"

    @property
    def mark(self) -> dict[str, str | float]:
        """The attribute by which the script finds what belongs to a run."""
        return {} if self.run is None else {"data-run": str(self.run)}


def metric_charts(run: RunFacts) -> Html | None:
    """The charts of one run, each with training and evaluation; None if nothing was trained."""
    lines: dict[str, list[ChartLine]] = defaultdict(list)
    for curve in run.curves:
        is_evaluation = curve.split == "eval"
        if not is_evaluation or curve.metric not in TRAINING_ONLY:
            lines[curve.metric].append(
                ChartLine(curve.split, int(is_evaluation), int(is_evaluation), curve.points)
            )
    if not lines:
        return None
    charts = (_chart(metric, lines[metric]) for metric in sorted(lines, key=metric_order))
    return tag("div", {"class": "charts"}, *charts)


def metric_order(metric: str) -> tuple[int, str]:
    return FIRST_METRICS.index(metric) if metric in FIRST_METRICS else len(FIRST_METRICS), metric


def metric_title(metric: str) -> str:
    return TITLES.get(metric, metric.replace("_", " "))


def _chart(metric: str, lines: Sequence[ChartLine]) -> Html:
    points = [point for line in lines for point in line.points]
    horizontal = Scale.over(point.step for point in points)
    vertical = Scale.over((end for point in points for end in (point.low, point.high)), margin=0.06)
    title = metric_title(metric)
    caption = join([tag("strong", None, title), " ", _legend(lines)])
    hover = json.dumps(_hover_texts(metric, lines, horizontal))
    return draw_chart(metric, title, lines, horizontal, vertical, caption, hover)


def draw_chart(
    metric: str,
    title: str,
    lines: Sequence[ChartLine],
    horizontal: Scale,
    vertical: Axis,
    caption: Html,
    hover: str,
) -> Html:
    def label(tick: float) -> str:
        return f"{100 * tick:.4g} %" if format_value(metric, tick).endswith("%") else f"{tick:.6g}"

    def step(tick: float) -> str:
        return f"{tick:.0f}" if tick == round(tick) else ""

    drawing = _drawing(lines, horizontal, vertical)
    return chart_figure(title, caption, drawing, horizontal, vertical, step, label, hover)


def chart_figure(
    title: str,
    caption: Html,
    drawing: Iterable[Html],
    horizontal: Scale,
    vertical: Axis,
    across: Callable[[float], str],
    up: Callable[[float], str],
    hover: str | None = None,
) -> Html:
    """A drawing on a grid, with its axes; across, up: the labels of their ticks; hover: JSON for the script."""
    heights = [(f"{100 * (1 - vertical.share(tick)):.2f}%", up(tick)) for tick in vertical.ticks()]
    grid = (tag("line", {"class": "grid", "x2": "100%", "y1": y, "y2": y}) for y, _ in heights)
    labels = (tag("text", {"x": "100%", "y": y}, label) for y, label in heights)
    steps = (
        tag("text", {"x": f"{100 * horizontal.share(tick):.2f}%", "y": 14}, label)
        for tick in horizontal.ticks()
        if (label := across(tick))
    )
    area = tag("svg", {"class": "area", "role": "img", "aria-label": title}, *grid, *drawing)
    axes = tag("svg", {"class": "up"}, *labels), area, tag("svg", {"class": "across"}, *steps)
    plot = tag("div", {"class": "plot", **({} if hover is None else {"data-hover": hover})}, *axes)
    return tag("figure", {"class": "chart"}, tag("figcaption", None, caption), plot)


def _legend(lines: Sequence[ChartLine]) -> Html:
    keys = []
    for line in lines:
        name = f"{line.name}: mean and range" if line.has_range else line.name
        keys.append(tag("span", {"class": "key"}, swatch(line), name))
    return join(keys)


def swatch(line: ChartLine) -> Html:
    """A piece of the line, for a legend."""
    stroke = tag("line", {"class": line.css_class, "x2": "100%", "y1": 5, "y2": 5})
    band = tag("rect", {"class": line.band_class, "width": "100%", "height": 10}) if line.has_range else None
    return tag("svg", {"class": "swatch"}, band, stroke)


def _drawing(lines: Sequence[ChartLine], horizontal: Scale, vertical: Axis) -> list[Html]:
    shapes, dots = [], []
    for line in lines:
        if line.has_range:
            highs = [_position(point.step, point.high, horizontal, vertical) for point in line.points]
            lows = [_position(point.step, point.low, horizontal, vertical) for point in line.points]
            shapes.append(
                tag("polygon", {"class": line.band_class, "points": _on_grid([*highs, *lows[::-1]])})
            )
        positions = [_position(point.step, point.mean, horizontal, vertical) for point in line.points]
        shapes.append(tag("polyline", {"class": line.css_class, **line.mark, "points": _on_grid(positions)}))
        if (
            len(positions) == 1 or len(positions) * len(lines) <= MAX_DOTS
        ):  # a single point would have no line at all
            for x, y in positions:
                center = {"cx": f"{100 * x:.2f}%", "cy": f"{100 * y:.2f}%"}
                dots.append(
                    tag("circle", {"class": curve_class(line.color), **line.mark, **center, "r": 2.5})
                )
    stretched = tag(
        "svg", {"viewBox": f"0 0 {GRID_SIZE} {GRID_SIZE}", "preserveAspectRatio": "none"}, *shapes
    )
    cross = tag("line", {"class": "cross", "y2": "100%", "visibility": "hidden"})
    return [stretched, *dots, cross]


def _position(step: float, value: float, horizontal: Scale, vertical: Axis) -> tuple[float, float]:
    return horizontal.share(step), 1 - vertical.share(value)


def _on_grid(positions: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{GRID_SIZE * x:.0f},{GRID_SIZE * y:.0f}" for x, y in positions)


def _hover_texts(metric: str, lines: Sequence[ChartLine], horizontal: Scale) -> list[tuple[float, str]]:
    texts: dict[float, list[str]] = defaultdict(list)
    titles: dict[float, str] = {}
    for line in lines:
        for point in line.points:
            ends = f"{point.first:.0f}", f"{point.last:.0f}"
            titles.setdefault(
                point.step, f"step {ends[0]}" if ends[0] == ends[1] else f"steps {' to '.join(ends)}"
            )
            low, high = format_value(metric, point.low), format_value(metric, point.high)
            extremes = f" ({low} to {high})" if low != high else ""
            texts[point.step].append(f"{line.name} {format_value(metric, point.mean)}{extremes}")
    return [
        (round(horizontal.share(step), 4), "\n".join([titles[step], *texts[step]])) for step in sorted(texts)
    ]
