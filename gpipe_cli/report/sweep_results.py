"""The results of a sweep: a table, the best job and the command that compares the runs; or one JSON document."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from gpipe_cli.errors import INTERRUPTED, PeerError, Stopped
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.page.run_files import RunFiles, as_number, watched_metric
from gpipe_cli.report.tables import print_facts, print_rows
from gpipe_cli.values import lower_is_better

COMPARISON = "comparison.html"


@final
@dataclass(frozen=True)
class JobResult:
    """How a job ended; as long as it runs, how it would have ended if its process were killed."""

    number: int
    overrides: Sequence[str]
    label: str
    """The overrides that not all jobs have."""
    summary: Mapping[str, Any] | None = None
    """None if it did not finish."""
    exit_code: int = PeerError.exit_code
    message: str = "its process was killed"
    """Why it failed or stopped."""
    run_dir: str | None = None
    """None if it did not come so far, or is no training run."""
    best: float | None = None
    """The best value of the metric that decides, of all evaluations of its run."""
    finished_earlier: bool = False

    @property
    def stopped(self) -> bool:
        return self.exit_code in (Stopped.exit_code, INTERRUPTED)

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 and not self.stopped

    @property
    def reason(self) -> str | None:
        return f"FAILED ({self.exit_code}): {self.message}" if self.failed else self.message or None


def best_value(run: Path) -> float | None:
    """The best value of all evaluations of a run, by the metric that it watches."""
    files = RunFiles(run)
    metric = watched_metric(files.text("config.yaml"))
    rows = files.json_lines("metrics.jsonl")
    values = [as_number(row.get(metric)) for row in rows if row.get("split") == "eval"]
    known = [value for value in values if value is not None]
    return (min if lower_is_better(metric) else max)(known, default=None)


def print_sweep(results: Sequence[JobResult], monitor: str | None, jobs: int, line: str) -> None:
    """monitor: the metric that decides which job is best; None for jobs that do not train. jobs: of the whole sweep.

    line: the command that repeats it.
    """
    if not results:
        return
    # Measured values are floats; the whole numbers and texts of a summary repeat the settings.
    floats = (
        name for result in results for name, value in (result.summary or {}).items() if type(value) is float
    )
    columns = list(dict.fromkeys(floats))
    best_column = [f"best_{monitor}"] if any(result.best is not None for result in results) else []
    table = [
        (
            result.number,
            result.label,
            *(result.best for _ in best_column),
            *((result.summary or {}).get(name) for name in columns),
            result.reason or result.run_dir or (result.summary or {}).get("run_dir"),
        )
        for result in results
    ]
    print_rows(_title(results, jobs), ("job", "overrides", *best_column, *columns, "result"), table)
    facts = {}
    if monitor is not None and (best := _best_job(results, monitor)) is not None:
        facts["best"] = f"job {best.number}: {best.label} ({monitor} {format_value(monitor, best.best)})"
    runs = list(dict.fromkeys(result.run_dir for result in results if result.run_dir is not None))
    if len(runs) > 1:
        facts["compare"] = shlex.join(["gpipe", "report", *runs, f"out={Path(runs[0]).parent / COMPARISON}"])
    if any(result.failed for result in results):
        facts["resume"] = line
    if facts:
        print_facts("", facts)


def print_sweep_json(results: Sequence[JobResult], monitor: str | None) -> None:
    best = None if monitor is None else _best_job(results, monitor)
    rows = [
        {
            "job": result.number,
            "overrides": result.overrides,
            "exit_code": result.exit_code,
            "error": result.reason,
            "finished_earlier": result.finished_earlier,
            **({} if monitor is None else {"best": result is best}),
            **(result.summary or {}),
            **({} if result.run_dir is None else {"run_dir": result.run_dir}),
        }
        for result in results
    ]
    sys.stdout.write(f"{json.dumps(rows)}\n")


def _title(results: Sequence[JobResult], jobs: int) -> str:
    counts = {
        "failed": sum(result.failed for result in results),
        "finished earlier": sum(result.finished_earlier for result in results),
        "stopped": sum(result.stopped for result in results),
        "not started": jobs - len(results),
    }
    shown = (f"{count} {name}" for name, count in counts.items() if count or name == "failed")
    return f"{jobs} jobs, {', '.join(shown)}"


def _best_job(results: Sequence[JobResult], monitor: str) -> JobResult | None:
    known = {result.number: result.best for result in results if result.best is not None}
    best = (min if lower_is_better(monitor) else max)(known, key=known.__getitem__, default=None)
    return next((result for result in results if result.number == best), None)
