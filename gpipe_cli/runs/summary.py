"""How a training run ends: summary.json and the printed result, or the command that resumes a stopped run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpipe_cli.activity import activity
from gpipe_cli.build.loader import BatchLoader
from gpipe_cli.config.job import Job, Summary, allow_override, resume_command
from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.distributed.world import World
from gpipe_cli.errors import DataError, ResourceError, Stopped
from gpipe_cli.report.formatting import describe, format_value
from gpipe_cli.report.model_tables import print_measured_memory
from gpipe_cli.report.output import print_status
from gpipe_cli.report.tables import print_facts
from gpipe_cli.runs.directory import write_json, write_text
from gpipe_cli.runs.reader import MAX_STEPS, RunReader, as_int
from gpipe_cli.runs.resume import longer_line
from gpipe_cli.runs.snapshots.manifest import snapshot_paths
from gpipe_cli.runs.snapshots.record import TrainingRecord
from gpipe_cli.training.loop import Position, TrainSpec
from gpipe_cli.training.signals import StopRequested, StopRequests, stop_requests
from gpipe_cli.values import text_word

SUMMARY, PAGE = "summary.json", "report.html"


def summarize(
    end: Position,
    loader: BatchLoader,
    directory: Path,
    job: Job,
    stopped_early: str | None = None,
) -> dict[str, Any]:
    """stopped_early: why, if it did."""
    last = end.evaluation
    return {
        **({"loss": last.loss, **last.means} if last is not None and end.evaluated else {}),
        "epochs": -(-end.step // loader.steps_per_epoch),
        "steps": end.step,
        **({"stopped_early": stopped_early} if stopped_early else {}),
        "samples_per_second": loader.samples_after(end.step) / end.seconds,
        "seconds": end.seconds,
        "run_dir": str(directory),
        "command": job.line,
    }


def finished_summary(
    directory: Path, record: TrainingRecord, spec: TrainSpec, loader: BatchLoader, job: Job
) -> Summary:
    """The summary of a run that has nothing left to train: the one in its directory, if that fits the record."""
    stopped_early = spec.stops_early(record.position.step, record.patience)
    summary = summarize(record.position, loader, directory, job, stopped_early)
    before = RunReader(directory).json(SUMMARY)
    may_differ = ("run_dir", "command")
    if all(before.get(key) == value for key, value in summary.items() if key not in may_differ):
        hint = f" early ({stopped_early}); raise early_stop.patience to continue" if stopped_early else ""
        print_status(f"{directory}: the run has finished{hint}; gpipe changed nothing")
        return before
    write_summary(directory, summary)
    return summary


def write_summary(run: Path, summary: Summary) -> None:
    # The last snapshot is already saved. If the disk is full, resuming the finished run writes the summary later.
    try:
        write_json(run / SUMMARY, summary)
    except ResourceError as error:
        print_status(f"warning: {error}")


def write_report(run: Path) -> None:
    """Write report.html when a run ends; only warn if that fails, because the results are already saved."""
    activity.now(f"writing {PAGE}")
    # Late: `gpipe train` starts in less time without it.
    from gpipe_cli.report.page.render import render_page
    from gpipe_cli.report.page.run_record import read_run

    try:
        write_text(run / PAGE, render_page([read_run(run)]))
    except Exception as error:  # noqa: BLE001 - a page must not turn a finished run into a failed one
        print_status(f"warning: {PAGE} was not written: {describe(error)}")


def _export_format(settings: TrainConfig, run: Path) -> list[str]:
    """A model of Hugging Face is exported to a directory, an adapter of one to peft's."""
    match settings.model:
        case {"path": _, "lora": {"rank": rank}}:
            return [f"format={'hf' if rank is None else 'peft'}", text_word("out", run / "exported")]
    return []


def _learns_text(settings: TrainConfig) -> bool:
    is_text = str(settings.data["_target_"]).startswith("gpipe_cli.data.texts.")
    return is_text and not settings.data.get("label") and settings.model.get("task") != "masked_lm"


def print_summary(summary: Summary, settings: TrainConfig) -> None:
    """Print the result with the commands that a user is likely to want next."""
    run = Path(str(summary.get("run_dir")))
    allow = allow_override(settings)
    longer = f"epochs={2 * settings.epochs}" if settings.steps is None else f"steps={2 * settings.steps}"
    if "stopped_early" in summary:
        longer = f"early_stop.patience={2 * (settings.early_stop.patience or 1)}"
    steps = as_int(summary.get("steps"), MAX_STEPS) or 1
    lr = None if "stopped_early" in summary else longer_line(settings, steps, 2 * steps)
    generate = {"generate": shlex.join(["gpipe", "generate", text_word("run", run), "prompt=..."])}
    next_commands = {
        "evaluate": shlex.join(["gpipe", "eval", text_word("run", run), *allow]),
        "train_longer": shlex.join(["gpipe", "train", text_word("resume", run), longer, *allow]),
        **({} if lr is None else {"learning_rate": lr}),
        **(generate if _learns_text(settings) else {}),
        "export": shlex.join(["gpipe", "export", text_word("run", run), *_export_format(settings, run)]),
    }
    print_measured_memory(summary.get("partitions", []))
    facts = {key: value for key, value in summary.items() if key != "partitions"}
    print_facts(
        "",
        {
            **facts,
            **_best_evaluation(run),
            "report": str(run / PAGE),
            **next_commands,
        },
    )


@contextmanager
def stop_with_resume_command(
    directory: Path, settings: TrainConfig, deadline: float | None, world: World
) -> Iterator[StopRequests]:
    """Turn signals and the time limit into requests that the loop heeds between steps.

    A stopped run leaves this context as Stopped or Interrupted (exit code 75 or 130) with the command to resume it.
    """
    with stop_requests(deadline=deadline, agree=world.max, patient=world.size > 1) as stops:
        try:
            yield stops
        except StopRequested as request:
            raise _stopped(request, "", directory, settings) from request
        except KeyboardInterrupt as error:  # a second Ctrl-C
            first = stops.request or StopRequested("Ctrl-C")
            raise _stopped(first, " at once", directory, settings) from error
        except DataError as error:
            # A scheduler signals every process of the job, data workers included. The training process then sees a
            # dead worker before it heeds its own signal; report the signal, not broken data.
            if (request_ := stops.request) is None:
                raise
            cause = f", which interrupted the current step ({describe(error)})"
            raise _stopped(request_, cause, directory, settings) from error


def _stopped(request: StopRequested, how: str, directory: Path, settings: TrainConfig) -> Stopped:
    reason = f"time_limit={settings.time_limit}" if request.reason == "time_limit" else request.reason
    snapshots = snapshot_paths(directory)
    if not snapshots:
        return request.error(f"stopped by {reason}{how}, before anything was saved in {directory}")
    command = resume_command(directory, settings)
    return request.error(f"stopped by {reason}{how}; saved in {snapshots[0]}; resume with: {command}")


def _best_evaluation(run: Path) -> dict[str, str]:
    """The best evaluation over all launches of the run."""
    files = RunReader(run)
    if (best := files.best()) is None:
        return {}
    value = format_value(files.monitor, best.value)
    return {"best_epoch": f"{(best.epoch or 0) + 1} (step {best.step}, {files.monitor} {value})"}
