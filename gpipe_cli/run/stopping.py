"""A training run that is asked to stop: it ends with the command that goes on with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpipe_cli.config.schema import TrainConfig
from gpipe_cli.distributed.team import Team
from gpipe_cli.errors import DataError, Stopped
from gpipe_cli.report.failure import describe
from gpipe_cli.run.resume import resume_command
from gpipe_cli.training.signals import StopRequested, StopRequests, stop_requests
from gpipe_cli.training.snapshot.finding import snapshot_paths


@contextmanager
def stopping(
    directory: Path, settings: TrainConfig, deadline: float | None, team: Team
) -> Iterator[StopRequests]:
    """Inside, signals and the time limit are requests; what they lead to leaves it as Stopped, exit code 75 or 130."""
    with stop_requests(deadline=deadline, agree=team.largest, patient=team.size > 1) as stops:
        try:
            yield stops
        except StopRequested as request:
            raise _stopped(request, "", directory, settings) from request
        except KeyboardInterrupt as error:  # a second Ctrl-C
            first = stops.request or StopRequested("Ctrl-C")
            raise _stopped(first, " at once", directory, settings) from error
        except DataError as error:
            # A signal to all processes of a job ends its data workers too, which must not look like broken data.
            if (cause := stops.request) is None:
                raise
            told = f", which broke the step under way ({describe(error)})"
            raise _stopped(cause, told, directory, settings) from error


def _stopped(request: StopRequested, how: str, directory: Path, settings: TrainConfig) -> Stopped:
    reason = f"time_limit={settings.time_limit}" if request.reason == "time_limit" else request.reason
    saved = snapshot_paths(directory)
    if not saved:
        return request.error(f"stopped by {reason}{how}, before anything was saved in {directory}")
    return request.error(
        f"stopped by {reason}{how}; saved in {saved[0]}; go on with: {resume_command(directory, settings)}"
    )
