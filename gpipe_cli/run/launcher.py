"""A job of several processes, started from this one: told what to do, watched, started again, and its end passed on.

Everything that can be wrong with the settings was found before. The ranks get the composed configuration and the
balance as a file; what rank 0 finds comes back the same way.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from gpipe_cli.config.schema import RunConfig, TrainConfig
from gpipe_cli.errors import ConfigError, Interrupted, PeerError, Stopped
from gpipe_cli.launch.rank_files import ExitReport, RankFiles
from gpipe_cli.launch.rank_group import RankGroup, RanksFailed
from gpipe_cli.report.output import print_status
from gpipe_cli.run.build import RunParts
from gpipe_cli.run.job import Job, Summary
from gpipe_cli.run.rank_setup import places
from gpipe_cli.run.resume import resume_command
from gpipe_cli.training.signals import StopRequested, StopRequests, stop_requests

__all__ = ["launched"]

# The child imports what its launcher does, from where it does: neither the current folder nor an installed
# package of the same name comes first. A signal that comes while it imports torch is remembered.
START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from gpipe_cli.training.signals import install_handlers; install_handlers(); "
    "from gpipe_cli.run.rank_main import main; main(sys.argv[1])"
)


def launched(settings: RunConfig, job: Job, parts: RunParts, began: float) -> Summary:
    """Run the job in ranks; what rank 0 found. began: when the command did, for its time limit."""
    if not hasattr(os, "pidfd_open"):
        raise ConfigError("engine=processes: starts its ranks on Linux only; start them with torchrun here")
    split, left = parts.partitioning, int(settings.engine.get("max_restarts", 0))
    if split.origin:
        print_status(f"balance {split.balance}: {split.origin}")
    who = places(len(split.balance), split.devices, settings.data_parallel)
    run: Path | None = None
    with stop_requests() as stops:
        ranks = RankGroup(who, settings.step_timeout, lambda: stops.signal)
        while True:
            try:
                return _result(ranks.run(partial(_entry, job, split.balance, began, run)))
            except RanksFailed as failed:
                run = failed.run_directory or run
                _end_if_asked(stops, failed, settings, run)
                if not left or not failed.is_transient:
                    raise failed.cause from failed
                left -= 1
                print_status(f"{failed}; starting all ranks again, restarts left: {left}")


def _entry(job: Job, balance: Sequence[int], began: float, run: Path | None, meeting: RankFiles) -> list[str]:
    """What a rank is told; run: the directory to go on in, of an attempt before."""
    task = {
        "launcher": os.getpid(),
        "command": job.command,
        "overrides": job.overrides,
        "line": job.line,
        "tree": OmegaConf.to_yaml(job.tree),
        "model": job.model,
        "number": job.number,
        "balance": balance,
        "began": began,
        "run": None if run is None else str(run),
    }
    meeting.task.write_text(json.dumps(task), encoding="utf-8")
    return ["-c", START, str(meeting.folder), *sys.path]


def _result(word: ExitReport) -> Summary:
    if word.exit_code == Interrupted.exit_code:
        raise Interrupted(word.message) if word.message else KeyboardInterrupt
    if word.exit_code == Stopped.exit_code:
        raise Stopped(word.message)
    assert word.summary is not None, "rank 0 gives what it found"
    return word.summary


def _end_if_asked(stops: StopRequests, failed: RanksFailed, settings: RunConfig, run: Path | None) -> None:
    """A signal finds ranks that are not listening yet, and ends them: that is no failure of theirs."""
    if isinstance(failed.cause, Interrupted):  # a second Ctrl-C
        raise _stopped(stops, " at once", settings, run) from failed
    if stops.signal is not None and isinstance(failed.cause, PeerError):
        raise _stopped(stops, f", which broke what was under way ({failed})", settings, run) from failed


def _stopped(stops: StopRequests, how: str, settings: RunConfig, run: Path | None) -> Stopped:
    request = stops.request or StopRequested("Ctrl-C")
    if run is None or not isinstance(settings, TrainConfig):
        return request.error(f"stopped by {request.reason}{how}")
    return request.error(f"stopped by {request.reason}{how}; resume with: {resume_command(run, settings)}")
