"""The results of a sweep: a table, the best job and the command that compares the runs; or one JSON document."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from gpipe_cli.errors import INTERRUPTED, PeerError, Stopped
from gpipe_cli.report.formatting import format_value
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
    exit_code: int = PeerError.exit_code
    error: str | None = f"FAILED ({PeerError.exit_code}): its process was killed"
    """Why it failed or stopped."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Empty if it did not finish."""
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


def best_job(results: Sequence[JobResult], monitor: str | None) -> JobResult | None:
    """monitor: the metric that decides; None for jobs that do not train."""
    known = {result.best: result for result in reversed(results) if result.best is not None}
    return known[(min if lower_is_better(monitor or "loss") else max)(known)] if known else None


def print_sweep(results: Sequence[JobResult], monitor: str | None, jobs: int, line: str) -> None:
    """jobs: how many the whole sweep has. line: the command that repeats it."""
    best = best_job(results, monitor)
    best_column = [] if best is None else [f"best_{monitor}"]
    # Measured values are floats; the whole numbers and texts of a summary repeat the settings.
    values = (pair for result in results for pair in result.summary.items())
    columns = dict.fromkeys(name for name, value in values if type(value) is float)
    table = [
        (
            result.number,
            result.label,
            *(result.best for _ in best_column),
            *(result.summary.get(name) for name in columns),
            result.error or result.run_dir or result.summary.get("run_dir"),
        )
        for result in results
    ]
    print_rows(_title(results, jobs), ("job", "overrides", *best_column, *columns, "result"), table)
    facts = {}
    if best is not None:
        facts["best"] = f"job {best.number}: {best.label} ({monitor} {format_value(str(monitor), best.best)})"
    runs = list(dict.fromkeys(result.run_dir for result in results if result.run_dir is not None))
    if len(runs) > 1:
        facts["compare"] = shlex.join(["gpipe", "report", *runs, f"out={Path(runs[0]).parent / COMPARISON}"])
    if any(result.failed for result in results):
        facts["resume"] = line
    if facts:
        print_facts("", facts)


def print_sweep_json(results: Sequence[JobResult], monitor: str | None) -> None:
    best = best_job(results, monitor)
    rows = [
        {
            "job": result.number,
            "overrides": result.overrides,
            "exit_code": result.exit_code,
            "error": result.error,
            "finished_earlier": result.finished_earlier,
            **({} if monitor is None else {"best": result is best}),
            **result.summary,
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
