"""The ranks of a run on this machine, forked by a server and supervised, in one attempt to run it.

The launcher decides on another: a layer that raises, a loss that is not finite or a full disk would only fail again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gpipe_cli.errors import GpipeError, Interrupted, PeerError, PeerRaised
from gpipe_cli.launch.fork_server import ForkServer
from gpipe_cli.launch.rank_files import ExitReport, RankFiles
from gpipe_cli.launch.rank_states import RankExit, root_cause
from gpipe_cli.launch.supervisor import Supervisor
from gpipe_cli.process_lifetime import temporary_folder


@final
class RanksFailed(Exception):
    """The ranks did not end cleanly; `cause` is the root cause."""

    def __init__(self, cause: GpipeError, run_directory: Path | None) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.run_directory = run_directory
        """None if the run failed before it had one."""

    @property
    def is_transient(self) -> bool:
        """Whether a restart may succeed: runs repeat to the bit, so a layer that raised would raise again."""
        return isinstance(self.cause, PeerError) and not isinstance(self.cause, PeerRaised)


@final
@dataclass(frozen=True)
class RankGroup:
    descriptions: Sequence[str]
    """The part of the model that each rank holds, for messages; one per rank."""
    step_timeout: float | None = None
    stop_signal: Callable[[], int | None] = lambda: None
    """The number of the signal that asked this process to stop, which is forwarded to the ranks."""

    def run(self, make_arguments: Callable[[RankFiles], Sequence[str]]) -> ExitReport:
        """Start the ranks and wait; the report of rank 0. make_arguments: of the interpreter that forks the ranks."""
        with temporary_folder("ranks") as folder:
            files = RankFiles(folder)
            try:
                cause = self._run(files, make_arguments(files))
            except PeerError as error:  # there is no server any more
                cause = error
            except KeyboardInterrupt as error:
                raise RanksFailed(Interrupted("stopped at once"), files.read_run_directory()) from error
            if cause is not None:
                raise RanksFailed(cause, files.read_run_directory())
            report = files.read_exit_report(0)
            assert report is not None, "a rank without an exit report has failed"
            return report

    def _run(self, files: RankFiles, arguments: Sequence[str]) -> GpipeError | None:
        """Run all ranks to their end; the root cause if they failed."""
        with ForkServer(arguments, len(self.descriptions)) as server:
            try:
                process_ids = server.process_ids()
            except KeyboardInterrupt:
                server.kill()
                raise
            with Supervisor(
                files, process_ids, self.step_timeout, self.stop_signal, server.wake
            ) as supervisor:
                try:
                    exit_codes = server.exit_codes()
                except (KeyboardInterrupt, PeerError):
                    supervisor.end_ranks()
                    raise
        return self._cause(files, supervisor, exit_codes)

    def _cause(
        self, files: RankFiles, supervisor: Supervisor, exit_codes: Mapping[int, int]
    ) -> GpipeError | None:
        # First: the supervisor killed every rank for it, so how they exited says nothing about the cause.
        if supervisor.stall is not None:
            assert self.step_timeout is not None, "without it, no rank counts as stalled"
            names = [f"rank {rank} ({self.descriptions[rank]})" for rank in supervisor.stall.ranks]
            return supervisor.stall.error(" and ".join(names), self.step_timeout)
        return root_cause(
            [
                RankExit(
                    rank,
                    description,
                    # A rank that the supervisor killed is a victim, not a suspect.
                    signal=None if rank in supervisor.killed or exit_codes[rank] >= 0 else -exit_codes[rank],
                    died_at=supervisor.deaths.get(rank, float("inf")),
                    report=files.read_exit_report(rank),
                )
                for rank, description in enumerate(self.descriptions)
            ]
        )
