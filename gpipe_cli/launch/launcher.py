"""Run one job in several processes of this machine: start ranks, watch them, restart them after a transient failure.

Everything that can be wrong with the settings was found before. The ranks read the composed configuration and the
balance from a file, and rank 0 returns the summary in its exit report. The launcher reads what all ranks do from their
files and from the kernel; `RankStates` judges it, as it does for the monitors of torchrun's ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, final

from gpipe_cli.errors import ConfigError, GpipeError, Interrupted, PeerError, PeerRaised, StepTimeout, Stopped
from gpipe_cli.launch.fork_server import ForkServer, killed_by, program
from gpipe_cli.launch.rank_files import ExitReport, Heartbeats, RankFiles, RankTask
from gpipe_cli.launch.rank_states import RankStates, RankStatus, Surroundings, is_suspended
from gpipe_cli.process_lifetime import AwakeClock, temporary_folder
from gpipe_cli.report.output import print_status
from gpipe_cli.runs.directory import write_outcome
from gpipe_cli.training.signals import StopRequested, StopRequests, stop_requests

GRACE_SECONDS = 2.0
"""How long the other ranks have to notice a failure and to end; one that waits for a lost peer never does."""
POLL_SECONDS = 0.1
"""Between two looks at heartbeats and signals; deaths are told at once."""


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
    imports = f"import gpipe_cli.jobs, gpipe_cli.commands.{task.command}, gpipe_cli.engines.processes"
    call = "gpipe_cli.jobs.run_as_rank(sys.argv[1])"
    # The launcher only records a signal and forwards it, and the ranks save and stop.
    with stop_requests() as stops:
        while True:
            attempt = run_ranks(task, imports, call, descriptions, step_timeout, lambda: stops.signal)
            if attempt.cause is None:
                return _result(attempt.report)
            if attempt.run_directory is not None:
                task = replace(task, run_directory=str(attempt.run_directory))
            # Before any restart: a rank that a stop signal killed is not a transient failure.
            error: GpipeError | None = _stopped(stops, attempt.cause, task, resume_command)
            if error is None and not (max_restarts and attempt.is_transient):
                error = attempt.cause
            if error is not None:
                if task.run_directory is not None:
                    # Rank 0 may have been killed, or has recorded only that it lost the rank that failed.
                    write_outcome(Path(task.run_directory), error)
                raise error
            max_restarts -= 1
            print_status(f"{attempt.cause}; restarting all ranks, restarts left: {max_restarts}")


def _result(report: ExitReport | None) -> Mapping[str, Any]:
    assert report is not None, "a rank without an exit report has failed"
    if report.exit_code == Interrupted.exit_code:
        raise Interrupted(report.message) if report.message else KeyboardInterrupt
    if report.exit_code == Stopped.exit_code:
        raise Stopped(report.message)
    assert report.summary is not None, "rank 0 reports a summary"
    return report.summary


def _stopped(
    stops: StopRequests, cause: GpipeError, task: RankTask, resume_command: Callable[[Path], str] | None
) -> Stopped | None:
    """A stop signal kills ranks that do not handle it yet; that is a stop, not a failure. None for a failure."""
    if isinstance(cause, Interrupted):  # a second Ctrl-C
        reason = " at once"
    elif stops.signal is not None and isinstance(cause, PeerError):
        reason = f", which interrupted the ranks ({cause})"
    else:
        return None
    request = stops.request or StopRequested("Ctrl-C")
    message = f"stopped by {request.reason}{reason}"
    if task.run_directory is not None and resume_command is not None:
        message += f"; resume with: {resume_command(Path(task.run_directory))}"
    return request.error(message)


@final
@dataclass(frozen=True)
class Attempt:
    """How an attempt to run all ranks ended."""

    cause: GpipeError | None
    """Why they did not end well; None if they did."""
    report: ExitReport | None
    """The exit report of rank 0."""
    run_directory: Path | None
    """None if the run ended before it had one."""

    @property
    def is_transient(self) -> bool:
        """Whether a restart may succeed: a run repeats bitwise, so a layer that raised would raise again."""
        return isinstance(self.cause, PeerError) and not isinstance(self.cause, PeerRaised)


def run_ranks(
    task: RankTask,
    imports: str,
    call: str,
    descriptions: Sequence[str],
    step_timeout: float | None,
    stop_signal: Callable[[], int | None] = lambda: None,
    grace: float = GRACE_SECONDS,
) -> Attempt:
    """Start the ranks once, and wait until all have ended.

    imports, call: as for `program`. descriptions: the part of the model that each rank holds, for messages.
    stop_signal: the number of the signal that asked this process to stop, which is forwarded to the ranks.
    """
    # Each attempt has a new folder, so the exit reports and the store of the last one cannot be mistaken for its own.
    with temporary_folder("ranks") as folder:
        files = RankFiles(folder)
        files.write_task(task)
        try:
            with ForkServer(program(imports, call, folder), len(descriptions)) as server:
                cause = _Watch(server, files, descriptions, step_timeout).until_end(stop_signal, grace)
        except PeerError as error:  # there is no server any more
            cause = error
        except KeyboardInterrupt:
            cause = Interrupted("stopped at once")
        return Attempt(cause, files.read_exit_report(0), files.read_run_directory())


@final
class _Watch:
    """What the launcher knows of its ranks."""

    def __init__(
        self, server: ForkServer, files: RankFiles, descriptions: Sequence[str], step_timeout: float | None
    ) -> None:
        self._server, self._files = server, files
        self._running = dict(server.process_ids())
        self._heartbeats = Heartbeats(files.heartbeats, len(descriptions))
        self._clock = AwakeClock()
        here = Surroundings(0, {}, descriptions.__getitem__)
        # No rank is ever silent: the launcher itself looks what it does.
        self._states = RankStates(
            len(descriptions), silence=inf, step_timeout=step_timeout, surroundings=here
        )

    def until_end(self, stop_signal: Callable[[], int | None], grace: float) -> GpipeError | None:
        """Wait until all ranks have ended, or must be ended; the root cause if they failed."""
        forwarded, end_at = False, inf
        while self._running:
            number = stop_signal()
            if number is not None and not forwarded:  # at a second Ctrl-C the launcher ends the ranks itself
                self._server.send_signal(number)
                forwarded = True
            now = self._hear(self._server.exit_codes(POLL_SECONDS))
            verdict = self._states.verdict(now)
            if verdict is not None:
                # Ranks that only wait for the one that failed need time to say so; those of a stall have had it.
                end_at = min(end_at, now if isinstance(verdict, StepTimeout) else now + grace)
            if now >= end_at:
                return verdict
        return self._states.verdict(inf)

    def _hear(self, exit_codes: Mapping[int, int]) -> float:
        """Take note of the ranks that have ended, and of what the others do; the time."""
        now, step_began = self._clock.tick(), self._heartbeats.read()
        reports = {rank: self._files.read_exit_report(rank) for rank in exit_codes}
        # In the order in which they failed, because the first of them is named.
        for rank, report in sorted(
            reports.items(), key=lambda item: inf if item[1] is None else item[1].time
        ):
            del self._running[rank]
            self._states.hear(rank, RankStatus(report=report, ended=_how_it_ended(exit_codes[rank])), now)
        for rank, process_id in self._running.items():
            self._states.hear(rank, RankStatus(step_began[rank], is_suspended(process_id)), now)
        return now


def _how_it_ended(exit_code: int) -> str:
    return " exited without a report" if exit_code >= 0 else f" {killed_by(-exit_code)}"
