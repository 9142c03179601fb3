"""gpipe report: rebuild the report of a run from the files in its directory, or compare several runs in one page.

Reads files only and does without torch. It replaces an earlier report, but no other file.
"""

from __future__ import annotations

from pathlib import Path

from gpipe_cli.activity import activity
from gpipe_cli.config.job import Job, Summary
from gpipe_cli.config.schema import ReportConfig
from gpipe_cli.errors import ConfigError
from gpipe_cli.report.output import print_status
from gpipe_cli.report.page.render import PAGE, check_replaceable, render_page
from gpipe_cli.report.page.run_record import read_run
from gpipe_cli.report.tables import print_facts
from gpipe_cli.runs.directory import write_text
from gpipe_cli.runs.reader import find_runs, is_run

COMPARISON = "comparison.html"


def run(settings: ReportConfig, job: Job) -> Summary:
    if not settings.run:
        raise ConfigError(
            "run: give a run directory: gpipe report runs/train/...; give several to compare them"
        )
    given = list(map(Path, settings.run))
    directories = [run for path in given for run in _runs_in(path)]
    page = PAGE if directories == given else COMPARISON
    out = Path(settings.out or (given[0] / page if len(given) == 1 else COMPARISON))
    check_replaceable("out", out)
    activity.now("making the page")
    runs = [read_run(directory) for directory in directories]
    write_text(out, render_page(runs))
    notes = [f"{run.path / note}" for run in runs for note in run.problems]
    facts = {"report": str(out), "bytes": out.stat().st_size, "runs": len(runs)}
    if job.shows_result:
        for note in notes:
            print_status(f"warning: {note}")
        print_facts("", facts)
    return {**facts, "runs": list(map(str, directories)), "notes": notes}


def _runs_in(path: Path) -> list[Path]:
    """The run in a directory, or those in the folders below it, such as the runs of a sweep."""
    return [path] if is_run(path) or not path.is_dir() else sorted(find_runs(path)[0]) or [path]
