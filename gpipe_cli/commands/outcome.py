"""What a training run ended with: summary.json, and what is printed of it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from gpipe_cli.commands.feed import Feed
from gpipe_cli.commands.jobs import Job, Summary
from gpipe_cli.commands.resume import Resumed, allow_words
from gpipe_cli.config.schema import Train
from gpipe_cli.report.tables import print_facts
from gpipe_cli.training.loop import Evaluated, Plan
from gpipe_cli.training.run_directory import write_json


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
    path = again.run / "summary.json"
    try:
        summary: Summary = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(summary, dict):
            sys.stderr.write(f"{again.run}: the run has finished; nothing is changed\n")
            return summary
    except (
        OSError,
        ValueError,
    ):  # it ended after its last snapshot and before its summary, which is made up for
        pass
    summary = summary_of(position.evaluation, plan, feed, again.run, job)
    write_json(path, summary)
    return summary


def show(summary: Summary, settings: Train) -> None:
    """To the person; with what a newcomer would type next."""
    evaluate = ["gpipe", "eval", f"run={summary.get('run_dir')}", *allow_words(settings)]
    print_facts("", {**summary, "evaluate": shlex.join(evaluate)})
