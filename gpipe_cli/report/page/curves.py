"""The curves of a run, reduced while metrics.jsonl is read: a run of a million rows needs no more memory than a short
one, and its page keeps every spike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from gpipe_cli.runs.reader import as_number, as_text
from gpipe_cli.values import lower_is_better

WINDOW_COLUMNS = ("loss_mean", "loss_min", "loss_max")
"""Columns of the training loss over the steps since the row before, drawn as one curve with the loss."""
OTHER_COLUMNS = {"step", "epoch", "split", "seconds", *WINDOW_COLUMNS}
"""Columns without a curve of their own: most say where a row stands, not what was measured."""
MAX_POINTS = 600
"""An even number: when a curve has so many, each two of them become one."""
MAX_CURVES = 200


class CurvePoint(NamedTuple):
    """One row of metrics, or the mean and the extremes of several consecutive ones."""

    first: float
    """Step of the first row."""
    last: float
    mean: float
    low: float
    high: float

    @property
    def step(self) -> float:
        """Where to draw it."""
        return (self.first + self.last) / 2


@final
@dataclass(frozen=True)
class MetricCurve:
    """One metric of one split over the steps of a run."""

    metric: str
    split: str
    points: tuple[CurvePoint, ...]
    """By step."""
    best: tuple[float, float]
    """Step and value of the best row."""


@final
class _Reduction:
    """The points of one curve while its rows are read."""

    def __init__(self, metric: str) -> None:
        self.points: list[CurvePoint] = []
        self._best: CurvePoint | None = None
        self._sign = 1 if lower_is_better(metric) else -1
        self._rows_per_point = 1
        self._rows: list[CurvePoint] = []

    def add(self, row: CurvePoint) -> None:
        if self._best is None or self._sign * row.mean < self._sign * self._best.mean:
            self._best = row
        self._rows.append(row)
        if len(self._rows) < self._rows_per_point:
            return
        self.points.append(_merge(self._rows))
        self._rows.clear()
        if len(self.points) == MAX_POINTS:
            self.points = [_merge(pair) for pair in zip(self.points[::2], self.points[1::2], strict=True)]
            self._rows_per_point *= 2

    def curve(self, metric: str, split: str) -> MetricCurve:
        assert self._best is not None, "a curve has at least one row"
        rest = [_merge(self._rows)] if self._rows else []
        best = (self._best.last, self._best.mean)
        return MetricCurve(metric, split, tuple(sorted([*self.points, *rest])), best)


def read_curves(metrics: Iterable[Mapping[str, Any]]) -> tuple[MetricCurve, ...]:
    """One per metric and split. A value that is not finite is left out of its own curve only."""
    curves: dict[tuple[str, str], _Reduction] = {}
    for row in metrics:
        step, split = as_number(row.get("step")), as_text(row.get("split"))
        if step is None:
            continue
        for metric, value in row.items():
            if metric in OTHER_COLUMNS or (number := as_number(value)) is None:
                continue
            if (metric, split) not in curves:
                if len(curves) == MAX_CURVES:
                    continue
                curves[metric, split] = _Reduction(metric)
            point = CurvePoint(step, step, number, number, number)
            curves[metric, split].add(_window(row, point) if metric == "loss" else point)
    return tuple(reduction.curve(*key) for key, reduction in curves.items())


def _window(row: Mapping[str, Any], loss: CurvePoint) -> CurvePoint:
    """The loss of all steps since the row before, or of this step alone if the row does not have them."""
    mean, low, high = (as_number(row.get(column)) for column in WINDOW_COLUMNS)
    if mean is None or low is None or high is None or not low <= high:
        return loss
    return loss._replace(mean=mean, low=low, high=high)


def _merge(points: Sequence[CurvePoint]) -> CurvePoint:
    if len(points) == 1:
        return points[0]
    return CurvePoint(
        points[0].first,
        points[-1].last,
        sum(point.mean for point in points) / len(points),
        min(point.low for point in points),
        max(point.high for point in points),
    )
