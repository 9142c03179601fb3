"""How runs compare: their order, best first, and their names, made of the settings that differ between them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.page.charts import ChartLine, metric_title, run_line
from gpipe_cli.report.page.run_record import RunRecord
from gpipe_cli.runs.reader import flat_config, monitor_of
from gpipe_cli.values import lower_is_better

NO_SETTINGS = ("run_dir", "resume", "allow", "time_limit")
"""Keys that do not change what a run computes."""
TARGET = "._target_"
MAX_LABEL = 90


@final
@dataclass(frozen=True)
class Comparison:
    runs: Sequence[RunRecord]
    """Best first; those without a result come last."""
    labels: Sequence[str]
    metric: str
    """Decides which is best."""
    values: Sequence[float | None]
    """The best value of each run."""
    differences: Sequence[Mapping[str, str]]
    """For each run the settings that not all runs share, by key."""
    results: Sequence[Mapping[str, str]]
    """For each run title and value of its results, the best value of the metric first."""

    @staticmethod
    def of(runs: Sequence[RunRecord], headlines: Sequence[Mapping[str, str]]) -> Comparison:
        """headlines: title and value of the results of each run."""
        metric = _metric(runs)
        sign = 1 if lower_is_better(metric) else -1

        def rank(index: int) -> tuple[bool, float]:
            value = _best_value(runs[index], metric)
            return value is None, sign * (value or 0.0)

        order = sorted(range(len(runs)), key=rank)
        ordered = [runs[index] for index in order]
        values = [_best_value(run, metric) for run in ordered]
        differences = _differences([flat_config(run.config) for run in ordered])
        title = f"best {metric_title(metric)}"
        results = [
            {
                **({} if values[0] is None else {title: format_value(metric, value)}),
                **{name: text for name, text in headlines[index].items() if name != f"best eval {metric}"},
            }
            for index, value in zip(order, values, strict=True)
        ]
        return Comparison(ordered, _labels(ordered), metric, values, differences, results)

    @property
    def best(self) -> int | None:
        """The position of the best run."""
        return None if self.values[0] is None else 0

    @property
    def folder(self) -> str:
        """The folder that all runs are in."""
        return os.path.commonpath([run.path.absolute().parent for run in self.runs])

    @property
    def titles(self) -> list[str]:
        return list(dict.fromkeys(title for result in self.results for title in result))

    @property
    def keys(self) -> list[str]:
        """The settings that differ."""
        return list(dict.fromkeys(key for own in self.differences for key in own))

    def path(self, index: int) -> str:
        return os.path.relpath(self.runs[index].path, self.folder)

    def line(self, index: int) -> ChartLine:
        """How the curves of a run look."""
        return run_line(index, self.labels[index], bold=index == self.best)


def _metric(runs: Sequence[RunRecord]) -> str:
    """The `snapshot.monitor` of the first run, if it measured it; else the loss."""
    monitor = monitor_of(flat_config(runs[0].config))
    measured = {curve.metric for run in runs for curve in run.curves if curve.split == "eval"}
    return monitor if monitor in measured else "loss"


def _best_value(run: RunRecord, metric: str) -> float | None:
    curves = (curve for curve in run.curves if (curve.metric, curve.split) == (metric, "eval"))
    return next((curve.best[1] for curve in curves), None)


def _differences(configs: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [
        key
        for key in keys
        if key not in NO_SETTINGS and len({config[key] for config in configs if key in config}) > 1
    ]
    return [{key: config[key] for key in differing if key in config} for config in configs]


def run_labels(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """What differs between the settings of runs, such as `lr=0.1 chunks=4`."""
    differences = _differences(configs)
    short = _short_keys(list(dict.fromkeys(key for own in differences for key in own)))
    return [
        " ".join(f"{short[key]}={_short(key, value)}" for key, value in own.items()) for own in differences
    ]


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """What differs, or the directory where that says nothing, too much or not enough."""
    labels = run_labels([flat_config(run.config) for run in runs])
    counts = Counter(labels)
    return [
        str(run.path)
        if not label or len(label) > MAX_LABEL
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
