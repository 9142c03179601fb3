"""The report page, from the records of runs and the templates beside this file.

One file. The content security policy allows the style and the script of the page by their digests and nothing else: the
page makes no request. Every text that a template shows is escaped and loses its invisible characters, so no text can
become code.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gpipe_cli.errors import ConfigError
from gpipe_cli.report.colors import ACTIONS, color_style, partition_class
from gpipe_cli.report.formatting import format_value, printable
from gpipe_cli.report.page.charts import Scale, comparison_charts, metric_charts
from gpipe_cli.report.page.comparison import Comparison
from gpipe_cli.report.page.run_record import (
    MetricCurve,
    RunRecord,
    TimelineBar,
    TimelineRecord,
    verdict_counts,
)
from gpipe_cli.runs.reader import as_number, flat_config, monitor_of
from gpipe_cli.safe_files import UnsafeFile, open_regular

PAGE = "report.html"
GENERATOR = '<meta name="generator" content="gpipe">'
"""How to tell a page of ours from another file of that name."""
RELOAD_SECONDS = 15
"""How often the page of a running run reloads itself."""
TITLES = {
    "loss": "eval loss",
    "top1": "top-1",
    "top5": "top-5",
    "steps": "steps",
    "samples_per_second": "samples per second",
    "seconds": "time",
    "predicted_step_ms": "predicted step, ms",
    "predicted_bubble": "predicted bubble",
    "predicted_speedup": "predicted speed-up",
    "forward_ms": "forward, ms",
    "backward_ms": "backward, ms",
    "forward_flops": "forward FLOPs",
    "backward_flops": "backward FLOPs",
    "saved_bytes": "saved for backward",
    "parameters": "parameters",
    "parameter_bytes": "memory of parameters",
    "run_bytes": "on disk",
}
"""Keys of a summary and their titles, in this order; other metrics follow under their own names."""
FEW_RUNS = 3
"""A comparison of more shows the details of a run on request only."""
HIDDEN = ("epochs", "micro_batch")


def render_page(runs: Sequence[RunRecord]) -> str:
    """The report of one run, or of several to compare."""
    now = datetime.now(UTC).replace(microsecond=0)
    if len(runs) == 1:
        (run,) = runs
        reloads = run.state is not None and run.state.name == "running"
        return render(
            "run.html",
            str(run.path),
            reload_seconds=RELOAD_SECONDS if reloads else None,
            run=run,
            headline=headline(run),
            charts=metric_charts(run),
            now=now,
        )
    comparison = Comparison.of(runs, [headline(run) for run in runs])
    return render(
        "comparison.html",
        f"Comparison of {len(runs)} runs",
        comparison=comparison,
        charts=comparison_charts(comparison.runs, comparison.labels, comparison.best),
        few_runs=FEW_RUNS,
        now=now,
    )


def render(template: str, title: str, reload_seconds: int | None = None, **content: Any) -> str:
    policy = (
        f"default-src 'none'; style-src {_digest(_style())}; script-src {_digest(_asset('script.js'))}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        environment()
        .get_template(template)
        .render(
            title=title,
            policy=policy,
            reload_seconds=reload_seconds,
            generator=Markup(GENERATOR),
            style=Markup(_style()),
            script=Markup(_asset("script.js")),
            **content,
        )
    )


@cache
def environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("gpipe_cli.report.page"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "shown": lambda value, name: format_value(name, value),
        "percent": lambda share, digits=2, unit="%": f"{100 * share:.{digits}f}{unit}",
        "grouped": "{:,}".format,
        "partition_class": partition_class,
        "on_one_scale": TimelineDrawing,
    }
    return environment


def _finalize(value: Any) -> Any:
    """Remove what cannot be seen from the texts of a page; what is markup already was made of such texts."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _asset(name: str) -> str:
    return files("gpipe_cli.report.page").joinpath(name).read_text(encoding="utf-8")


def _style() -> str:
    # The colors first: the rest may make an exception of one.
    return color_style() + _asset("style.css")


def _digest(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@final
@dataclass(frozen=True)
class TimelineDrawing:
    """Timelines by title on one scale: the sizes, in pixels, that their template draws with."""

    timelines: Mapping[str, TimelineRecord]
    row_height: ClassVar = 26
    bar_height: ClassVar = 22
    axis_height: ClassVar = 20
    min_width: ClassVar = 900
    min_bar_width: ClassVar = 14
    """The least width of the average bar: the picture scrolls if the screen is too narrow for it."""
    letter_width: ClassVar = 7

    @cached_property
    def scale(self) -> Scale:
        return Scale(0, max(timeline.milliseconds for timeline in self.timelines.values()) or 1.0)

    @cached_property
    def width(self) -> int:
        counts = (Counter(bar.lane for bar in timeline.bars) for timeline in self.timelines.values())
        return max(self.min_width, self.min_bar_width * max(max(count.values()) for count in counts))

    @property
    def shares_devices(self) -> bool:
        """Whether a device has several partitions."""
        return any(len(lane) > 1 for timeline in self.timelines.values() for lane in timeline.lanes)

    @cached_property
    def phases(self) -> list[str]:
        found = {bar.phase for timeline in self.timelines.values() for bar in timeline.bars}
        return [phase for phase in ACTIONS if phase in found]

    def has_room(self, bar: TimelineBar) -> bool:
        """Whether its label fits into the bar."""
        return self.width * self.scale.share(bar.milliseconds) > self.letter_width * len(bar.label)


def headline(run: RunRecord) -> dict[str, str]:
    """Title and value of the results of a run."""
    numbers = {name: value for name, value in run.summary.items() if as_number(value) is not None}
    results = {TITLES[name]: format_value(name, numbers[name]) for name in TITLES if name in numbers}
    results = results or _latest_metrics(run.curves)
    results |= {verdict: str(count) for verdict, count in verdict_counts(run.checks).items()}
    monitor = monitor_of(flat_config(run.config))
    for curve in run.curves:
        if curve.split == "eval" and curve.metric in ("loss", monitor):
            step, value = curve.best
            results[f"best eval {curve.metric}"] = f"{format_value(curve.metric, value)} at step {step:.0f}"
    for name, value in numbers.items():
        if name not in TITLES and name not in HIDDEN:
            results[name.replace("_", " ")] = format_value(name, value)
    if run.measured is not None:
        results["recorded step, ms"] = f"{run.measured.milliseconds:.1f}"
        results["recorded bubble"] = format_value("bubble", run.measured.bubble)
    return results


def _latest_metrics(curves: Sequence[MetricCurve]) -> dict[str, str]:
    """For a run that has not finished: what it measured last."""
    losses = {
        f"{curve.split} loss": format_value("loss", curve.points[-1].mean)
        for curve in curves
        if curve.metric == "loss"
    }
    steps = [curve.points[-1].last for curve in curves]
    return {**losses, "steps": f"{max(steps):.0f}, not finished"} if steps else {}


def check_replaceable(key: str, out: Path) -> None:
    try:
        with os.fdopen(open_regular(out, base=out.parent), encoding="utf-8", errors="replace") as file:
            is_report = GENERATOR in file.read(4096)
    except FileNotFoundError:
        return
    except UnsafeFile as error:
        raise ConfigError(f"{key}={out}: {error}; give another name, or remove it") from error
    except OSError as error:
        raise ConfigError(f"{key}={out}: cannot be written: {error}") from error
    if not is_report:
        raise ConfigError(f"{key}={out}: exists and is not a report; give another name, or remove it")
