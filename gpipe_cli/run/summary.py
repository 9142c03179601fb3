"""What a training run ended with: summary.json, and what is printed of it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.errors import ResourceError, RunError
from gpipe_cli.report.output import say
from gpipe_cli.report.page.document import PAGE
from gpipe_cli.report.page.files import Files, number, whole
from gpipe_cli.report.tables import print_facts
from gpipe_cli.run.data import Feed
from gpipe_cli.run.job import Job, Summary
from gpipe_cli.run.resume import Resumed, allow_words
from gpipe_cli.safe_files import parse_json, read_regular
from gpipe_cli.training.loop import Evaluated, Plan
from gpipe_cli.training.run_directory import write_json

SUMMARY = "summary.json"
LARGEST_EPOCH = 10**9
LARGEST = 2**20


def summary_of(last: Evaluated, plan: Plan, feed: Feed, directory: Path, job: Job) -> dict[str, Any]:
    return {
        "loss": last.loss,
        **last.means,
        "epochs": plan.epochs,
        "steps": last.step,
        "samples_per_second": feed.samples_after(last.step) / last.seconds,
        "seconds": last.seconds,
        "run_dir": str(directory),
        "command": job.line,
    }


def finished_before(again: Resumed, plan: Plan, feed: Feed, job: Job) -> Summary | None:
    """The summary of a run that has nothing left to do; None where it has."""
    position = None if again.snapshot is None else again.snapshot.record.position
    if (
        position is None
        or position.evaluation is None
        or not position.evaluated
        or position.step != plan.steps
    ):
        return None
    summary = summary_of(position.evaluation, plan, feed, again.run, job)
    before = _summary_before(again.run)
    if all(before.get(key) == value for key, value in summary.items() if key not in ("run_dir", "command")):
        sys.stderr.write(f"{again.run}: the run has finished; nothing is changed\n")
        return before
    write_summary(again.run, summary)
    return summary


def _summary_before(run: Path) -> Summary:
    """What summary.json says; nothing where it is damaged, or a run ended between its last snapshot and it."""
    try:
        found = parse_json(read_regular(run / SUMMARY, LARGEST, base=run))
    except (FileNotFoundError, ValueError):
        return {}
    except OSError as error:
        raise RunError(f"{run / SUMMARY}: cannot be read: {error}; remove it") from error
    return found if isinstance(found, dict) else {}


def write_summary(run: Path, summary: Summary) -> None:
    """What was trained is saved by now: a summary that cannot be written is made up for by resuming the run."""
    try:
        write_json(run / SUMMARY, summary)
    except ResourceError as error:
        say(f"warning: {error}")


def show(summary: Summary, settings: TrainConfig) -> None:
    """To the person; with what a newcomer would type next."""
    run = Path(str(summary.get("run_dir")))
    print_facts("", {**summary, **_best(run), "report": str(run / PAGE), **_next(run, settings)})


def _best(run: Path) -> dict[str, str]:
    """The evaluation with the smallest loss of all launches of the run."""
    rows = [row for row in Files(run).json_lines("metrics.jsonl") if row.get("split") == "eval"]
    found = [(loss, row) for row in rows if (loss := number(row.get("loss"))) is not None]
    if not found:
        return {}
    loss, row = min(found, key=lambda one: one[0])
    epoch = whole(row.get("epoch"), LARGEST_EPOCH) or 0
    return {"best_epoch": f"{epoch + 1} (step {row.get('step')}, loss {loss:.4g})"}


def _next(run: Path, settings: TrainConfig) -> dict[str, str]:
    """Each works as it is printed."""
    longer = f"epochs={2 * settings.epochs}" if settings.steps is None else f"steps={2 * settings.steps}"
    allow = allow_words(settings)
    return {
        "evaluate": shlex.join(["gpipe", "eval", f"run={run}", *allow]),
        "train_longer": shlex.join(["gpipe", "train", f"resume={run}", longer, *allow]),
        "export": shlex.join(["gpipe", "export", f"run={run}"]),
    }
