"""The ranks of a run on this machine: children of this process, started by torch's elastic agent and supervised.

Each attempt gets a new agent. The agent could restart ranks itself, but it would do so after any failure; a layer that
raises, a loss that is not finite or a full disk would only fail again, so the launcher counts the attempts.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from gpipe_cli.errors import GpipeError, Interrupted, PeerError, PeerRaised
from gpipe_cli.launch.rank_files import ExitReport, RankFiles
from gpipe_cli.launch.root_cause import RankExit, root_cause
from gpipe_cli.launch.supervisor import Supervisor
from gpipe_cli.process_lifetime import temporary_folder

LOCALHOST = "127.0.0.1"
AGENT_ENVIRONMENT = {
    # Otherwise the agent offers its rendezvous file to the ranks as if it were a TCP store.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # The launcher handles every signal that asks a run to stop, and forwards it; the agent would kill the ranks.
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
}
SHUTDOWN_SECONDS = 1
"""How long the agent waits for ranks that have to end at once."""


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
        """Start the ranks with these arguments of the Python interpreter, and wait; the report of rank 0."""
        with temporary_folder("ranks") as folder, _agent_environment():
            files = RankFiles(folder)
            agent = self._agent(files, make_arguments(files))

            def process_ids() -> Mapping[int, int]:
                ids = {worker.local_rank: worker.id for worker in agent.get_worker_group().workers}
                # All or none: the agent fills them in one after another, and the supervisor asks until it gets some.
                return ids if all(process_id is not None for process_id in ids.values()) else {}

            ranks = len(self.descriptions)
            with Supervisor(files, ranks, process_ids, self.step_timeout, self.stop_signal) as supervisor:
                try:
                    result = agent.run()
                except KeyboardInterrupt as error:
                    raise RanksFailed(Interrupted("stopped at once"), files.read_run_directory()) from error
                finally:
                    agent.get_worker_group().spec.rdzv_handler.shutdown()
            cause = self._cause(files, supervisor, result)
            if cause is not None:
                raise RanksFailed(cause, files.read_run_directory())
            report = files.read_exit_report(0)
            assert report is not None, "a rank without an exit report has failed"
            return report

    def _agent(self, files: RankFiles, arguments: Sequence[str]) -> LocalElasticAgent:
        """An agent that starts all ranks once; its rendezvous is a file, so no port is opened."""
        rendezvous = RendezvousParameters(
            backend="c10d",
            endpoint=str(files.folder / "agent"),
            run_id="gpipe",
            min_nodes=1,
            max_nodes=1,
            local_addr=LOCALHOST,
            store_type="file",
        )
        spec = WorkerSpec(
            role="rank",
            local_world_size=len(self.descriptions),
            entrypoint=sys.executable,
            args=tuple(arguments),
            rdzv_handler=get_rendezvous_handler(rendezvous),
            max_restarts=0,
            local_addr=LOCALHOST,
        )
        logs = DefaultLogsSpecs(log_dir=os.devnull)
        return LocalElasticAgent(spec, logs, shutdown_timeout=SHUTDOWN_SECONDS)

    def _cause(self, files: RankFiles, supervisor: Supervisor, result: RunResult) -> GpipeError | None:
        # First: the supervisor killed every rank for it, so how they exited says nothing about the cause.
        if supervisor.stall is not None:
            assert self.step_timeout is not None, "without it, no rank counts as stalled"
            names = [f"rank {rank} ({self.descriptions[rank]})" for rank in supervisor.stall.ranks]
            return supervisor.stall.error(names, self.step_timeout)
        return root_cause(
            [
                RankExit(
                    rank,
                    description,
                    # A rank that the supervisor killed is a victim, not a suspect.
                    signal=None if rank in supervisor.killed else _signal(result, rank),
                    died_at=supervisor.deaths.get(rank, float("inf")),
                    report=files.read_exit_report(rank),
                )
                for rank, description in enumerate(self.descriptions)
            ]
        )


def _signal(result: RunResult, rank: int) -> int | None:
    code = result.failures[rank].exitcode if rank in result.failures else 0
    return -code if code < 0 else None


@contextmanager
def _agent_environment() -> Iterator[None]:
    """Set the environment variables the agent needs, and discard its log: the launcher reports failures better."""
    log, discard = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    propagated, before = log.propagate, {name: os.environ.get(name) for name in AGENT_ENVIRONMENT}
    os.environ.update(AGENT_ENVIRONMENT)
    log.propagate = False
    log.addHandler(discard)
    try:
        yield
    finally:
        log.propagate = propagated
        log.removeHandler(discard)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
