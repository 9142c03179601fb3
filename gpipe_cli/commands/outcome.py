"""What a training run ended with: summary.json, and what is printed of it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from gpipe_cli.commands.feed import Feed
from gpipe_cli.commands.jobs import Job, Summary
from gpipe_cli.commands.report import PAGE
from gpipe_cli.commands.resume import Resumed, allow_words
from gpipe_cli.config.schema import Train
from gpipe_cli.errors import ResourceError
from gpipe_cli.report.output import say
from gpipe_cli.report.tables import print_facts
from gpipe_cli.training.loop import Evaluated, Plan
from gpipe_cli.training.run_directory import write_json

SUMMARY = "summary.json"


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
    try:
        summary: Summary = json.loads((again.run / SUMMARY).read_text(encoding="utf-8"))
        if isinstance(summary, dict):
            sys.stderr.write(f"{again.run}: the run has finished; nothing is changed\n")
            return summary
    except (
        OSError,
        ValueError,
    ):  # it ended after its last snapshot and before its summary, which is made up for
        pass
    summary = summary_of(position.evaluation, plan, feed, again.run, job)
    write_summary(again.run, summary)
    return summary


def write_summary(run: Path, summary: Summary) -> None:
    """What was trained is saved by now: a summary that cannot be written is made up for by resuming the run."""
    try:
        write_json(run / SUMMARY, summary)
    except ResourceError as error:
        say(f"warning: {error}")


def show(summary: Summary, settings: Train) -> None:
    """To the person; with what a newcomer would type next."""
    evaluate = ["gpipe", "eval", f"run={summary.get('run_dir')}", *allow_words(settings)]
    report = Path(str(summary.get("run_dir"))) / PAGE
    print_facts("", {**summary, "report": str(report), "evaluate": shlex.join(evaluate)})
