"""The results of a sweep: a table, the best job and the command that compares the runs; or one JSON document."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from gpipe_cli.errors import INTERRUPTED, Stopped
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.page.run_files import RunFiles, as_number
from gpipe_cli.report.tables import print_facts, print_rows
from gpipe_cli.values import lower_is_better

COMPARISON = "comparison.html"


@final
@dataclass(frozen=True)
class JobResult:
    """How a job ended."""

    overrides: tuple[str, ...]
    summary: Mapping[str, Any] | None = None
    """None if it did not finish."""
    exit_code: int = 0
    message: str = ""
    """Why it failed or stopped."""
    run_dir: Path | None = None
    """None if it did not come so far, or is no training run."""
    finished_earlier: bool = False

    @property
    def failed(self) -> bool:
        return self.exit_code not in (0, Stopped.exit_code, INTERRUPTED)

    @property
    def reason(self) -> str | None:
        return f"FAILED ({self.exit_code}): {self.message}" if self.failed else self.message or None

    def best_value(self, metric: str) -> float | None:
        """The best value of all evaluations of its run."""
        if self.run_dir is None:
            return None
        rows = RunFiles(self.run_dir).json_lines("metrics.jsonl")
        values = [as_number(row.get(metric)) for row in rows if row.get("split") == "eval"]
        known = [value for value in values if value is not None]
        return (min if lower_is_better(metric) else max)(known) if known else None


def swept_words(jobs: Sequence[tuple[str, ...]]) -> list[str]:
    """For each job the overrides that not all jobs have."""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    return [" ".join(word for word in job if word not in common) for job in jobs]


def print_sweep(results: Mapping[int, JobResult], monitor: str | None, jobs: int) -> None:
    """monitor: the metric that decides which job is best; None for jobs that do not train. jobs: of the whole sweep."""
    if not results:
        return
    summaries = [result.summary or {} for result in results.values()]
    # Measured values are floats; the whole numbers and texts of a summary repeat the settings.
    columns = list(
        dict.fromkeys(name for summary in summaries for name in summary if isinstance(summary[name], float))
    )
    values = _best_values(results, monitor)
    best_column = [f"best_{monitor}"] if values else []
    words = swept_words([result.overrides for result in results.values()])
    table = [
        (
            number,
            label,
            *([values.get(number)] if values else []),
            *(summary.get(name) for name in columns),
            result.reason or summary.get("run_dir"),
        )
        for (number, result), summary, label in zip(results.items(), summaries, words, strict=True)
    ]
    print_rows(_title(results, jobs), ("job", "overrides", *best_column, *columns, "result"), table)
    facts = {}
    if monitor is not None and (best := _best_job(values, monitor)) is not None:
        label = dict(zip(results, words, strict=True))[best]
        facts["best"] = f"job {best}: {label} ({monitor} {format_value(monitor, values[best])})"
    runs = [result.run_dir for result in results.values() if result.run_dir is not None]
    if len(runs) > 1:
        out = f"out={runs[0].parent / COMPARISON}"
        facts["compare"] = shlex.join(["gpipe", "report", *map(str, runs), out])
    if facts:
        print_facts("", facts)


def print_sweep_json(results: Mapping[int, JobResult], monitor: str | None) -> None:
    best = None if monitor is None else _best_job(_best_values(results, monitor), monitor)
    rows = [
        {
            "job": number,
            "overrides": result.overrides,
            "exit_code": result.exit_code,
            "error": result.reason,
            "finished_earlier": result.finished_earlier,
            **({} if monitor is None else {"best": number == best}),
            **(result.summary or {}),
            **({} if result.run_dir is None else {"run_dir": str(result.run_dir)}),
        }
        for number, result in results.items()
    ]
    sys.stdout.write(f"{json.dumps(rows)}\n")


def _title(results: Mapping[int, JobResult], jobs: int) -> str:
    counts = {
        "failed": sum(result.failed for result in results.values()),
        "finished earlier": sum(result.finished_earlier for result in results.values()),
        "stopped": sum(result.exit_code != 0 and not result.failed for result in results.values()),
        "not started": jobs - len(results),
    }
    shown = (f"{count} {name}" for name, count in counts.items() if count or name == "failed")
    return f"{jobs} jobs, {', '.join(shown)}"


def _best_values(results: Mapping[int, JobResult], monitor: str | None) -> dict[int, float]:
    if monitor is None:
        return {}
    values = {number: result.best_value(monitor) for number, result in results.items()}
    return {number: value for number, value in values.items() if value is not None}


def _best_job(values: Mapping[int, float], monitor: str) -> int | None:
    return (min if lower_is_better(monitor) else max)(values, key=values.__getitem__, default=None)
