"""The results of a sweep: a table, the best job and the command that compares the runs; or one JSON document."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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

    job: int
    overrides: Sequence[str]
    label: str
    """The overrides that not all jobs have."""
    exit_code: int = PeerError.exit_code
    error: str | None = f"FAILED ({PeerError.exit_code}): its process was killed"
    """Why it failed or stopped."""
    finished_earlier: bool = False
    run_dir: str | None = None
    """None if it did not come so far, or is no training run."""
    best: float | None = None
    """The best value of the metric that decides, of all evaluations of its run."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Empty if it did not finish."""

    @property
    def stopped(self) -> bool:
        return self.exit_code in (Stopped.exit_code, INTERRUPTED)

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 and not self.stopped


def print_sweep(results: Sequence[JobResult], monitor: str | None, jobs: int, line: str) -> None:
    """monitor: the metric that decides; None for jobs that do not train. jobs: of the whole sweep.

    line: the command that repeats it.
    """
    values = [{f"best_{monitor}": result.best, **result.summary} for result in results]
    # Measured values are floats; the whole numbers and texts of a summary repeat the settings.
    measured = (name for row in values for name, value in row.items() if type(value) is float)
    columns = list(dict.fromkeys(measured))
    table = [
        (
            result.job,
            result.label,
            *map(row.get, columns),
            result.error or result.run_dir or row.get("run_dir"),
        )
        for result, row in zip(results, values, strict=True)
    ]
    print_rows(_title(results, jobs), ("job", "overrides", *columns, "result"), table)
    facts = {}
    if monitor is not None and (best := _best_job(results, monitor)) is not None:
        facts["best"] = f"job {best.job}: {best.label} ({monitor} {format_value(monitor, best.best)})"
    runs = list(dict.fromkeys(result.run_dir for result in results if result.run_dir is not None))
    if len(runs) > 1:
        facts["compare"] = shlex.join(["gpipe", "report", *runs, f"out={Path(runs[0]).parent / COMPARISON}"])
    if any(result.failed for result in results):
        facts["resume"] = line
    if facts:
        print_facts("", facts)


def print_sweep_json(results: Sequence[JobResult], monitor: str | None) -> None:
    best = None if monitor is None else _best_job(results, monitor)
    rows = [{**asdict(result), "best": result is best, **result.summary} for result in results]
    for row in rows:
        del row["summary"]
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
    known = {result.best: result for result in reversed(results) if result.best is not None}
    return known[(min if lower_is_better(monitor) else max)(known)] if known else None
