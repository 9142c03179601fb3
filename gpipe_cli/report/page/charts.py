"""The charts of a report: metrics over the steps of training, and timelines of the ideal and the measured step.

Lines stretch with the page, texts do not, so a phone shows as much as a wide screen. `script.js` shows the values under
the pointer from the attribute `data-hover`: positions from left to right, each with its text.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.page.html import Html, join, tag
from gpipe_cli.report.page.run_facts import MetricCurve, RunFacts, TimelineBar, TimelineFacts

FIRST_METRICS = ("loss", "top1", "accuracy", "mean_iou", "lr", "samples_per_second")
"""The order of charts; other metrics follow by name."""
TITLES = {"samples_per_second": "samples per second", "lr": "learning rate", "top1": "top-1", "top5": "top-5"}
TRAINING_ONLY = ("lr", "samples_per_second")
"""Metrics that say nothing new, or nothing comparable, about an evaluation."""
MAX_POINTS = 600
MAX_DOTS = 40
GRID_SIZE = 1000
"""Lines are drawn on a square of this side, which the browser stretches."""
TICKS = 5
"""About how many fit on an axis."""
EQUAL = 1e-9
"""Values that differ by less than this share count as one value; the arithmetic of ticks could not part them."""
TINY = 1e-200
PHASES = ("forward", "recompute", "backward", "copy")
ROW_HEIGHT = 26
BAR_HEIGHT = 22
AXIS_HEIGHT = 20
MIN_WIDTH = 900
MIN_BAR_WIDTH = 14
"""Pixels of the average bar: the picture scrolls if the screen is narrower than that."""
LETTER_WIDTH = 7


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


@final
@dataclass(frozen=True)
class ChartLine:
    name: str
    color: int
    dashed: bool
    points: Sequence[tuple[float, float]]

    @property
    def css_class(self) -> str:
        return f"line c{self.color % 8}{' dashed' if self.dashed else ''}"


def metric_charts(runs: Sequence[RunFacts]) -> Html | None:
    """None if nothing was trained."""
    lines: dict[str, list[ChartLine]] = defaultdict(list)
    for index, run in enumerate(runs):
        for curve in run.curves:
            if curve.split != "eval" or curve.metric not in TRAINING_ONLY:
                lines[curve.metric].append(_chart_line(curve, run, index if len(runs) > 1 else None))
    if not lines:
        return None
    order = sorted(
        lines,
        key=lambda name: (FIRST_METRICS.index(name) if name in FIRST_METRICS else len(FIRST_METRICS), name),
    )
    return tag("div", {"class": "charts"}, *(_chart(metric, lines[metric]) for metric in order))


def _chart_line(curve: MetricCurve, run: RunFacts, index: int | None) -> ChartLine:
    """With several runs each has a color, else each split; evaluations are always dashed."""
    is_evaluation = curve.split == "eval"
    name = curve.split if index is None else f"{run.path.name} {curve.split}"
    color = int(is_evaluation) if index is None else index
    return ChartLine(name, color, is_evaluation, thin_points(curve.points))


def thin_points(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Few enough points to draw: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return list(points)
    stretch = -(-2 * len(points) // MAX_POINTS)
    thinned: list[tuple[float, float]] = []
    for begin in range(0, len(points), stretch):
        part = points[begin : begin + stretch]
        thinned += sorted({min(part, key=_value), max(part, key=_value)})
    return [*thinned, points[-1]] if thinned[-1] != points[-1] else thinned


def _value(point: tuple[float, float]) -> float:
    return point[1]


def _chart(metric: str, lines: Sequence[ChartLine]) -> Html:
    horizontal = Scale.over(step for line in lines for step, _ in line.points)
    vertical = Scale.over((value for line in lines for _, value in line.points), margin=0.06)
    title = TITLES.get(metric, metric.replace("_", " "))
    return tag(
        "figure",
        {"class": "chart"},
        tag("figcaption", None, tag("strong", None, title), " ", _legend(lines)),
        tag(
            "div",
            {"class": "plot", "data-hover": json.dumps(_hover_texts(metric, lines, horizontal))},
            _vertical_axis(metric, vertical),
            tag(
                "svg",
                {"class": "area", "role": "img", "aria-label": title},
                *_drawing(lines, horizontal, vertical),
            ),
            _horizontal_axis(horizontal),
        ),
    )


def _legend(lines: Sequence[ChartLine]) -> Html:
    keys = []
    for line in lines:
        stroke = tag("line", {"class": line.css_class, "x2": "100%", "y1": 5, "y2": 5})
        keys.append(tag("span", {"class": "key"}, tag("svg", {"class": "swatch"}, stroke), line.name))
    return join(keys)


def _drawing(lines: Sequence[ChartLine], horizontal: Scale, vertical: Scale) -> list[Html]:
    grid = [
        tag("line", {"class": "grid", "x2": "100%", "y1": y, "y2": y})
        for y in (f"{100 * (1 - vertical.share(tick)):.2f}%" for tick in vertical.ticks())
    ]
    polylines, dots = [], []
    for line in lines:
        positions = [(horizontal.share(step), 1 - vertical.share(value)) for step, value in line.points]
        points = " ".join(f"{GRID_SIZE * x:.0f},{GRID_SIZE * y:.0f}" for x, y in positions)
        polylines.append(tag("polyline", {"class": line.css_class, "points": points}))
        if len(positions) <= MAX_DOTS:  # a single point would have no line at all
            for x, y in positions:
                center = {"cx": f"{100 * x:.2f}%", "cy": f"{100 * y:.2f}%"}
                dots.append(tag("circle", {"class": f"c{line.color % 8}", **center, "r": 2.5}))
    stretched = tag(
        "svg", {"viewBox": f"0 0 {GRID_SIZE} {GRID_SIZE}", "preserveAspectRatio": "none"}, *polylines
    )
    cross = tag("line", {"class": "cross", "y2": "100%", "visibility": "hidden"})
    return [*grid, stretched, *dots, cross]


def _vertical_axis(metric: str, vertical: Scale) -> Html:
    labels = []
    for tick in vertical.ticks():
        is_percentage = format_value(metric, tick).endswith("%")
        label = f"{100 * tick:.4g} %" if is_percentage else f"{tick:.6g}"
        labels.append(tag("text", {"x": "100%", "y": f"{100 * (1 - vertical.share(tick)):.2f}%"}, label))
    return tag("svg", {"class": "up"}, *labels)


def _horizontal_axis(horizontal: Scale) -> Html:
    steps = [tick for tick in horizontal.ticks() if tick == round(tick)]
    return tag(
        "svg",
        {"class": "across"},
        *(
            tag("text", {"x": f"{100 * horizontal.share(step):.2f}%", "y": 14}, f"{step:.0f}")
            for step in steps
        ),
    )


def _hover_texts(metric: str, lines: Sequence[ChartLine], horizontal: Scale) -> list[tuple[float, str]]:
    texts: dict[float, list[str]] = defaultdict(list)
    for line in lines:
        for step, value in line.points:
            texts[step].append(f"{line.name} {format_value(metric, value)}")
    return [
        (round(horizontal.share(step), 4), "\n".join([f"step {step:.0f}", *texts[step]]))
        for step in sorted(texts)
    ]


def step_timelines(run: RunFacts) -> Html | None:
    """None if no step was recorded."""
    if run.measured is None:
        return None
    timelines = (
        {"measured": run.measured} if run.ideal is None else {"ideal": run.ideal, "measured": run.measured}
    )
    longest = max(timeline.milliseconds for timeline in timelines.values()) or 1.0
    most_bars = max(
        max(Counter(bar.partition for bar in timeline.bars).values()) for timeline in timelines.values()
    )
    width = max(MIN_WIDTH, MIN_BAR_WIDTH * most_bars)
    figures = [_figure(title, timeline, Scale(0, longest), width) for title, timeline in timelines.items()]
    legend = tag("p", {"class": "legend"}, *(_legend_key(phase) for phase in PHASES))
    advice = (
        tag("p", None, tag("strong", None, "Try this: "), "; ".join(run.advice), ".") if run.advice else None
    )
    return join([legend, *figures, advice])


def _legend_key(phase: str) -> Html:
    swatch = tag("svg", {"class": "swatch"}, tag("rect", {"class": phase, "width": "100%", "height": 10}))
    return tag("span", {"class": "key"}, swatch, phase)


def _figure(title: str, timeline: TimelineFacts, scale: Scale, width: int) -> Html:
    """width: at least so many pixels."""
    height = ROW_HEIGHT * timeline.partitions
    bubble = "" if timeline.bubble is None else f", bubble {format_value('bubble', timeline.bubble)}"
    names = (
        tag("text", {"x": "100%", "y": ROW_HEIGHT * index + BAR_HEIGHT / 2}, str(index))
        for index in range(timeline.partitions)
    )
    area = tag(
        "svg",
        {"class": "bars", "width": width, "height": height + AXIS_HEIGHT},
        *_axis(scale, height),
        *(_bar(bar, scale, width) for bar in timeline.bars),
    )
    return tag(
        "figure",
        {"class": f"timeline {title}"},
        tag("figcaption", None, tag("strong", None, title), f" {timeline.milliseconds:.1f} ms{bubble}"),
        tag(
            "div",
            {"class": "rows"},
            tag("svg", {"class": "names", "height": height + AXIS_HEIGHT}, *names),
            tag("div", {"class": "scroll", "tabindex": "0"}, area),
        ),
    )


def _bar(bar: TimelineBar, scale: Scale, width: int) -> Html:
    tooltip = (
        f"{bar.label}: {bar.phase}\npartition {bar.partition}, micro-batch {bar.micro_batch}\n"
        f"{bar.milliseconds:.3f} ms, from {bar.begin:.3f} ms"
    )
    geometry: dict[str, str | float] = {
        "x": f"{100 * scale.share(bar.begin):.3f}%",
        "width": f"{100 * scale.share(bar.milliseconds):.3f}%",
        "y": ROW_HEIGHT * bar.partition,
        "height": BAR_HEIGHT,
    }
    has_room = width * scale.share(bar.milliseconds) > LETTER_WIDTH * len(bar.label)
    return tag(
        "svg",
        {"class": "piece", **geometry},
        tag("title", None, tooltip),
        tag(
            "rect",
            {"class": bar.phase if bar.phase in PHASES else "copy", "width": "100%", "height": "100%"},
        ),
        tag("text", {"x": "50%", "y": "50%"}, bar.label) if has_room else None,
    )


def _axis(scale: Scale, height: float) -> list[Html]:
    axis = []
    for tick in scale.ticks():
        x = f"{100 * scale.share(tick):.2f}%"
        axis.append(tag("line", {"class": "grid", "x1": x, "x2": x, "y2": height}))
        if tick:  # 0 needs no label
            axis.append(tag("text", {"class": "mark", "x": x, "y": height + 14}, f"{tick:.6g} ms"))
    return axis
