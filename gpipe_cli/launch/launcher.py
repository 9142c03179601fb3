"""Run one job in several processes: start its ranks, restart them after a transient failure, return rank 0's summary.

Everything that can be wrong with the settings was found before. The ranks read the composed configuration and the
balance from a file, and rank 0 returns the summary in its exit report.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpipe_cli.errors import ConfigError, GpipeError, Interrupted, PeerError, Stopped
from gpipe_cli.launch.fork_server import program
from gpipe_cli.launch.outcome import write_outcome
from gpipe_cli.launch.rank_files import ExitReport, RankFiles, RankTask
from gpipe_cli.launch.rank_group import RankGroup, RanksFailed
from gpipe_cli.report.output import print_status
from gpipe_cli.training.signals import StopRequested, StopRequests, stop_requests


def launch_ranks(
    task: RankTask,
    descriptions: Sequence[str],
    *,
    step_timeout: float | None,
    max_restarts: int,
    resume_command: Callable[[Path], str] | None,
) -> Mapping[str, Any]:
    """Run the task in one rank per description; the summary of rank 0.

    resume_command: the command that resumes a run directory; None if the job cannot be resumed.
    """
    if not hasattr(os, "pidfd_open"):
        raise ConfigError("engine=processes: starts its ranks on Linux only; start them with torchrun here")
    # The launcher only records a signal; the supervisor forwards it, and the ranks save and stop.
    with stop_requests() as stops:
        ranks = RankGroup(descriptions, step_timeout, lambda: stops.signal)
        while True:
            try:
                return _result(ranks.run(partial(_program, task)))
            except RanksFailed as failed:
                if failed.run_directory is not None:
                    task = replace(task, run_directory=str(failed.run_directory))
                # Before any restart: a rank that a stop signal killed is not a transient failure.
                error: GpipeError | None = _stopped(stops, failed, task, resume_command)
                if error is None and not (max_restarts and failed.is_transient):
                    error = failed.cause
                if error is not None:
                    if task.run_directory is not None:
                        # Rank 0 may have been killed, or has recorded only that it lost the rank that failed.
                        write_outcome(Path(task.run_directory), error)
                    raise error from failed
                max_restarts -= 1
                print_status(f"{failed}; restarting all ranks, restarts left: {max_restarts}")


def _program(task: RankTask, files: RankFiles) -> list[str]:
    # Each attempt has a new folder, so the exit reports and the store of the last one cannot be mistaken for its own.
    files.write_task(task)
    imports = f"import gpipe_cli.jobs, gpipe_cli.commands.{task.command}, gpipe_cli.engines.processes"
    return program(imports, "gpipe_cli.jobs.run_as_rank(sys.argv[1])", files.folder)


def _result(report: ExitReport) -> Mapping[str, Any]:
    if report.exit_code == Interrupted.exit_code:
        raise Interrupted(report.message) if report.message else KeyboardInterrupt
    if report.exit_code == Stopped.exit_code:
        raise Stopped(report.message)
    assert report.summary is not None, "rank 0 reports a summary"
    return report.summary


def _stopped(
    stops: StopRequests,
    failed: RanksFailed,
    task: RankTask,
    resume_command: Callable[[Path], str] | None,
) -> Stopped | None:
    """A stop signal kills ranks that do not handle it yet; that is a stop, not a failure. None for a failure."""
    if isinstance(failed.cause, Interrupted):  # a second Ctrl-C
        reason = " at once"
    elif stops.signal is not None and isinstance(failed.cause, PeerError):
        reason = f", which interrupted the ranks ({failed})"
    else:
        return None
    request = stops.request or StopRequested("Ctrl-C")
    message = f"stopped by {request.reason}{reason}"
    if task.run_directory is not None and resume_command is not None:
        message += f"; resume with: {resume_command(Path(task.run_directory))}"
    return request.error(message)
