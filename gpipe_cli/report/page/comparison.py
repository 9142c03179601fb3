"""The page that compares runs: results, charts and settings, with the runs named by what differs between them.

A run that is much worse must not flatten the others in a chart: such a chart has a logarithmic scale, or cuts off the
values of a run that diverged, and says so.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
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
from gpipe_cli.report.page.html import Child, Html, join, table, tag
from gpipe_cli.report.page.run_facts import RunFacts
from gpipe_cli.values import lower_is_better

NO_SETTINGS = ("run_dir", "resume", "allow", "time_limit")
"""Keys that do not change what a run computes."""
TARGET = "._target_"
LONGEST_LABEL = 90
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
class Comparison:
    runs: Sequence[RunFacts]
    """Best first; those without a result come last."""
    labels: Sequence[str]
    metric: str
    """Decides which is best."""
    values: Sequence[float | None]
    """The best value of each run."""
    differences: Sequence[Mapping[str, str]]
    """For each run the settings that not all runs share, by key."""

    @staticmethod
    def of(runs: Sequence[RunFacts]) -> Comparison:
        configs = [flatten_yaml(run.config) for run in runs]
        metric = _metric(runs, configs)
        values = [_best_value(run, metric) for run in runs]
        sign = 1 if lower_is_better(metric) else -1
        order = sorted(
            range(len(runs)), key=lambda index: (values[index] is None, sign * (values[index] or 0.0))
        )
        differences = _differences([configs[index] for index in order])
        ordered = [runs[index] for index in order]
        return Comparison(
            ordered, _labels(ordered, differences), metric, [values[index] for index in order], differences
        )

    @property
    def best(self) -> int | None:
        """The position of the best run."""
        return None if self.values[0] is None else 0

    @property
    def folder(self) -> str:
        """The folder that all runs are in."""
        return os.path.commonpath([run.path.absolute().parent for run in self.runs])

    def results(self, headlines: Sequence[Mapping[str, str]]) -> Html:
        """A row per run, marked with the line of its curves; headlines: title and value of its results."""
        titles = list(dict.fromkeys(title for headline in headlines for title in headline))
        best_title = [f"best {metric_title(self.metric)}"] if self.best is not None else []
        # The latest losses of a run that has not finished would be columns of their own.
        shown = [title for title in titles if title not in best_title and not title.startswith("loss (")]
        rows: list[list[Child]] = [
            [
                self._name(index),
                *([_value(self.metric, self.values[index], best=index == self.best)] if best_title else []),
                *(headlines[index].get(title, "-") for title in shown),
            ]
            for index in range(len(self.runs))
        ]
        return table("runs", ("run", *best_title, *shown), rows)

    def charts(self) -> Html | None:
        return comparison_charts(self.runs, self.labels, self.best)

    def settings(self) -> Html | None:
        """A row per run and a column per key; None if all runs have the same settings."""
        keys = list(dict.fromkeys(key for own in self.differences for key in own))
        rows: list[tuple[Child, ...]] = [
            (self._name(index), *(own.get(key, "-") for key in keys))
            for index, own in enumerate(self.differences)
        ]
        return table("runs", ("run", *keys), rows) if keys else None

    def _name(self, index: int) -> Html:
        path = os.path.relpath(self.runs[index].path, self.folder)
        return tag(
            "div",
            {"class": "run-name"},
            swatch(run_line(index, "", bold=index == self.best)),
            tag("a", {"href": f"#run{index}"}, self.labels[index]),
            tag("small", None, path) if str(self.runs[index].path) != self.labels[index] else None,
        )


def _value(metric: str, value: float | None, *, best: bool) -> Html:
    mark = tag("span", {"class": "verdict ok"}, "best") if best else None
    return join([format_value(metric, value), " " if best else None, mark])


def _metric(runs: Sequence[RunFacts], configs: Sequence[Mapping[str, str]]) -> str:
    """The `snapshot.monitor` of the first run, if it measured it; else the loss."""
    monitor = configs[0].get("snapshot.monitor", "loss")
    measured = {curve.metric for run in runs for curve in run.curves if curve.split == "eval"}
    return monitor if monitor in measured else "loss"


def _best_value(run: RunFacts, metric: str) -> float | None:
    for curve in run.curves:
        if (curve.metric, curve.split) == (metric, "eval"):
            return curve.best()[1]
    return None


def _differences(configs: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [
        key
        for key in keys
        if key not in NO_SETTINGS and len({config[key] for config in configs if key in config}) > 1
    ]
    return [{key: config[key] for key in differing if key in config} for config in configs]


def _labels(runs: Sequence[RunFacts], differences: Sequence[Mapping[str, str]]) -> list[str]:
    """What differs, such as `lr=0.1 chunks=4`; the directory where that says nothing, too much or not enough."""
    short = _short_keys(list(dict.fromkeys(key for own in differences for key in own)))
    labels = [
        " ".join(f"{short[key]}={_short(key, value)}" for key, value in own.items()) for own in differences
    ]
    counts = Counter(labels)
    return [
        str(run.path)
        if not label or len(label) > LONGEST_LABEL
        else f"{label} ({run.path.name})"
        if counts[label] > 1
        else label
        for run, label in zip(runs, labels, strict=True)
    ]


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or the whole key where that part is not unique; `optimizer` for its `_target_`."""
    names = {key: key.removesuffix(TARGET).rpartition(".")[2] for key in keys}
    counts = Counter(names.values())
    return {key: name if counts[name] == 1 else key.removesuffix(TARGET) for key, name in names.items()}


def _short(key: str, value: str) -> str:
    return value.rpartition(".")[2] if key.endswith(TARGET) else value


def flatten_yaml(config: str) -> dict[str, str]:
    """Dotted keys and their values of YAML as gpipe writes it: one key per line, two spaces per level.

    The page shows the file and never interprets it, so reading its lines is enough. List items belong to their key.
    """
    values: dict[str, str] = {}
    parents: list[str] = []
    for line in config.splitlines():
        key, colon, value = line.strip().partition(":")
        depth = (len(line) - len(line.lstrip())) // 2
        if line.lstrip().startswith("- ") and parents:
            path = ".".join(parents)
            values[path] = f"{values.get(path, '')} {line.strip()[2:]}".strip()
        elif colon:
            parents = [*parents[:depth], key]
            values[".".join(parents)] = value.strip()
    return values


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
    """One chart per metric and split, with a line per run, and one legend for all of them; None if no run has metrics.

    best: the run whose lines are bold.
    """
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
