"""The charts of a report: metrics over the steps of training, of one run or of several.

Lines stretch with the page, texts do not, so a phone shows as much as a wide screen. `script.js` shows the values under
the pointer from the attribute `data-hover`: positions from left to right, each with its text. A run that is much worse
must not flatten the others in a chart: such a chart has a logarithmic scale, or cuts off the values of a run that
diverged, and says so.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final

from markupsafe import Markup

from gpipe_cli.report.colors import CURVES, curve_class
from gpipe_cli.report.formatting import format_value, printable
from gpipe_cli.report.page.run_record import CurvePoint, RunRecord

FIRST_METRICS = ("loss", "top1", "accuracy", "mean_iou", "lr", "samples_per_second")
"""The order of charts; other metrics follow by name."""
TITLES = {"samples_per_second": "samples per second", "lr": "learning rate", "top1": "top-1", "top5": "top-5"}
SPLITS = {"train": "training", "eval": "evaluation"}
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
FLAT = 0.1
"""A usual run that takes less than this share of the height is flattened by another."""
FAR_ABOVE = 30
"""A run that reaches so many times the height of a usual run has diverged, and is cut off."""
HEADROOM = 0.15
"""The share of the height above the other runs in which a run that is cut off leaves the chart."""
MARGIN = 0.06
DECADE_MARKS = (1, 2, 5)
FEW_DECADES = 3
FIGURE = """<figure class="chart"><figcaption>{caption}</figcaption><div class="plot"{hover}>
<svg class="up">{up}</svg>
<svg class="area" role="img" aria-label="{title}">{area}</svg>
<svg class="across">{across}</svg>
</div></figure>
"""


def shape(source: str, **values: str | float) -> Markup:
    """The source with values in it: texts are escaped, and numbers get two decimals, as a screen shows no more."""
    return Markup(source).format(**{name: _visible(value) for name, value in values.items()})


def _visible(value: str | float) -> str:
    if isinstance(value, str):
        return value if isinstance(value, Markup) else printable(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")


def join(shapes: Iterable[str]) -> Markup:
    return Markup("").join(shapes)


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
    def mark(self) -> Markup:
        """The attribute by which the script finds what belongs to a run."""
        return Markup() if self.run is None else shape(' data-run="{run}"', run=self.run)

    @property
    def swatch(self) -> Markup:
        """A piece of the line, for a legend."""
        band = '<rect class="band {color}" width="100%" height="10"/>' if self.has_range else ""
        stroke = '<line class="{line}" x2="100%" y1="5" y2="5"/>'
        color = curve_class(self.color)
        return shape(f'<svg class="swatch">{band}{stroke}</svg>', color=color, line=self.css_class)


def run_line(index: int, name: str, points: Sequence[CurvePoint] = (), *, bold: bool = False) -> ChartLine:
    """The line of a run by its position in the comparison: colors first, then other strokes with the same colors."""
    return ChartLine(name, index, index // len(CURVES) % len(DASHES), points, run=index, bold=bold)


def metric_charts(run: RunRecord) -> list[Markup]:
    """The charts of one run, each with training and evaluation."""
    lines: dict[str, list[ChartLine]] = defaultdict(list)
    for curve in run.curves:
        is_evaluation = curve.split == "eval"
        if not is_evaluation or curve.metric not in TRAINING_ONLY:
            lines[curve.metric].append(
                ChartLine(curve.split, int(is_evaluation), int(is_evaluation), curve.points)
            )
    return [_run_chart(metric, lines[metric]) for metric in sorted(lines, key=metric_order)]


def comparison_charts(runs: Sequence[RunRecord], names: Sequence[str], best: int | None) -> list[Markup]:
    """One chart per metric and split, with a line per run; best: the run whose lines are bold."""
    lines: dict[tuple[str, str], list[ChartLine]] = defaultdict(list)
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        for curve in run.curves:
            if curve.split != "eval" or curve.metric not in TRAINING_ONLY:
                points = [point._replace(low=point.mean, high=point.mean) for point in curve.points]
                lines[curve.metric, curve.split].append(run_line(index, name, points, bold=index == best))
    order = sorted(lines, key=lambda key: (*metric_order(key[0]), key[1]))
    return [_comparison_chart(*key, lines[key]) for key in order]


def metric_order(metric: str) -> tuple[int, str]:
    return FIRST_METRICS.index(metric) if metric in FIRST_METRICS else len(FIRST_METRICS), metric


def metric_title(metric: str) -> str:
    return TITLES.get(metric, metric.replace("_", " "))


def _run_chart(metric: str, lines: Sequence[ChartLine]) -> Markup:
    points = [point for line in lines for point in line.points]
    horizontal = Scale.over(point.step for point in points)
    vertical = _linear_scale(metric, [end for point in points for end in (point.low, point.high)])
    title = metric_title(metric)
    keys = (
        shape(
            '<span class="key">{swatch}{name}</span>',
            swatch=line.swatch,
            name=f"{line.name}: mean and range" if line.has_range else line.name,
        )
        for line in lines
    )
    caption = shape("<strong>{title}</strong> {legend}", title=title, legend=join(keys))
    hover = json.dumps(_hover_texts(metric, lines, horizontal))
    return draw_chart(metric, title, lines, horizontal, vertical, caption, hover)


def _comparison_chart(metric: str, split: str, lines: Sequence[ChartLine]) -> Markup:
    points = [point for line in lines for point in line.points]
    horizontal = Scale.over(point.step for point in points)
    vertical, limit = _vertical_scale(metric, lines)
    cut = sum(any(point.mean > limit for point in line.points) for line in lines)
    notes = ["logarithmic scale"] if isinstance(vertical, LogScale) else []
    if cut:
        notes.append(f"values above {limit:.3g} are cut off ({cut} run{'s' if cut > 1 else ''})")
    title = f"{metric_title(metric)}, {SPLITS.get(split, split)}"
    note = shape('<span class="scale-note">{notes}</span>', notes="; ".join(notes)) if notes else ""
    caption = shape("<strong>{title}</strong> {note}", title=title, note=note)
    drawn = [
        replace(line, points=[point._replace(mean=min(point.mean, limit)) for point in line.points])
        for line in lines
    ]
    return draw_chart(metric, title, drawn, horizontal, vertical, caption, _hover(metric, lines, horizontal))


def _linear_scale(metric: str, values: Sequence[float]) -> Scale:
    scale = Scale.over(values, margin=MARGIN)
    if not _is_percentage(metric) or min(values) < 0 or max(values) > 1:
        return scale
    return Scale(max(0.0, scale.low), min(1.0, scale.high))


def _is_percentage(metric: str) -> bool:
    return format_value(metric, 1.0).endswith("%")


def _vertical_scale(metric: str, lines: Sequence[ChartLine]) -> tuple[Axis, float]:
    """The scale of a chart, and the value above which it cuts off."""
    values = [point.mean for line in lines for point in line.points]
    if _is_percentage(metric):
        return _linear_scale(metric, values), math.inf
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


def draw_chart(
    metric: str,
    title: str,
    lines: Sequence[ChartLine],
    horizontal: Scale,
    vertical: Axis,
    caption: Markup,
    hover: str,
) -> Markup:
    def label(tick: float) -> str:
        return f"{100 * tick:.4g} %" if _is_percentage(metric) else f"{tick:.6g}"

    def step(tick: float) -> str:
        return f"{tick:.0f}" if tick == round(tick) else ""

    drawing = _drawing(lines, horizontal, vertical)
    return chart_figure(title, caption, drawing, horizontal, vertical, step, label, hover)


def chart_figure(
    title: str,
    caption: Markup,
    drawing: Iterable[Markup],
    horizontal: Scale,
    vertical: Axis,
    across: Callable[[float], str],
    up: Callable[[float], str],
    hover: str | None = None,
) -> Markup:
    """A drawing on a grid, with its axes; across, up: the labels of their ticks; hover: JSON for the script."""
    heights = [(f"{100 * (1 - vertical.share(tick)):.2f}%", up(tick)) for tick in vertical.ticks()]
    grid = (shape('<line class="grid" x2="100%" y1="{y}" y2="{y}"/>', y=y) for y, _ in heights)
    labels = (shape('<text x="100%" y="{y}">{label}</text>', y=y, label=label) for y, label in heights)
    steps = (
        shape('<text x="{x}%" y="14">{label}</text>', x=100 * horizontal.share(tick), label=label)
        for tick in horizontal.ticks()
        if (label := across(tick))
    )
    return shape(
        FIGURE,
        title=title,
        caption=caption,
        hover="" if hover is None else shape(' data-hover="{hover}"', hover=hover),
        up=join(labels),
        area=join([*grid, *drawing]),
        across=join(steps),
    )


def _drawing(lines: Sequence[ChartLine], horizontal: Scale, vertical: Axis) -> list[Markup]:
    shapes, dots = [], []
    for line in lines:
        color = curve_class(line.color)
        if line.has_range:
            highs = [_position(point.step, point.high, horizontal, vertical) for point in line.points]
            lows = [_position(point.step, point.low, horizontal, vertical) for point in line.points]
            band = _on_grid([*highs, *lows[::-1]])
            shapes.append(shape('<polygon class="band {color}" points="{band}"/>', color=color, band=band))
        positions = [_position(point.step, point.mean, horizontal, vertical) for point in line.points]
        shapes.append(
            shape(
                '<polyline class="{line}"{mark} points="{points}"/>',
                line=line.css_class,
                mark=line.mark,
                points=_on_grid(positions),
            )
        )
        # A single point would have no line at all.
        if len(positions) == 1 or len(positions) * len(lines) <= MAX_DOTS:
            circle = '<circle class="{color}"{mark} cx="{x}%" cy="{y}%" r="2.5"/>'
            dots += [shape(circle, color=color, mark=line.mark, x=100 * x, y=100 * y) for x, y in positions]
    stretched = shape(
        '<svg viewBox="0 0 {size} {size}" preserveAspectRatio="none">{shapes}</svg>',
        size=GRID_SIZE,
        shapes=join(shapes),
    )
    return [stretched, *dots, Markup('<line class="cross" y2="100%" visibility="hidden"/>')]


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


def _hover(metric: str, lines: Sequence[ChartLine], horizontal: Scale) -> str:
    """JSON: positions from left to right, each with its title and the values of the runs, best run first."""
    texts: dict[float, list[tuple[str, str]]] = defaultdict(list)
    for line in lines:
        for point in line.points:
            texts[point.step].append((str(line.run), format_value(metric, point.mean)))
    return json.dumps(
        [[round(horizontal.share(step), 4), f"step {step:.0f}", texts[step]] for step in sorted(texts)]
    )
