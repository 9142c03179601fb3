"""The ranks of a run on this machine: started by torch's elastic agent as children of this process, and watched.

One agent per attempt. The agent could start ranks again by itself, but it would do so after any failure; a layer that
raises, a loss that is not finite or a disk that is full would only fail again, so the attempts are counted here. The
agent meets over a file, so that nothing listens. Knows nothing of what the ranks do: it is given their command line.
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
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from gpipe_cli.engines.blame import End, failure, frozen
from gpipe_cli.engines.meeting import LastWord, Meeting
from gpipe_cli.engines.watch import Watch
from gpipe_cli.errors import GpipeError, Interrupted, PeerError, PeerRaised
from gpipe_cli.owned_folder import owned_folder

__all__ = ["Crew", "Failed", "launch"]

ADDRESS = "127.0.0.1"
OF_THE_AGENT = {
    # Else the agent would offer its file to the ranks as if it were a port of its own.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # All that ask a run to stop are heard by the launcher, which forwards them; the agent would end the ranks.
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
}
SHUTDOWN = 1
"""Seconds the agent waits for ranks that are to end at once."""

Entry = Callable[[Meeting], Sequence[str]]
"""The arguments of Python for a rank that comes to this meeting."""


@final
@dataclass(frozen=True)
class Crew:
    """Who is to be started."""

    places: Sequence[str]
    """The part each rank has, for people; as many as there are ranks."""
    step_timeout: float | None = None
    asked: Callable[[], int | None] = lambda: None
    """The number of a signal that this process was sent, to be forwarded to the ranks."""


@final
class Failed(Exception):
    """Ranks that did not come to an end in good order, and why."""

    def __init__(self, cause: GpipeError, run: Path | None) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.run = run
        """The directory of the run, if it had come so far."""

    @property
    def may_pass(self) -> bool:
        """Whether another attempt may do better: a run repeats to the bit, so what was raised would be again."""
        return isinstance(self.cause, PeerError) and not isinstance(self.cause, PeerRaised)


def launch(crew: Crew, entry: Entry) -> LastWord:
    """Start the ranks and wait for their end; what rank 0 said at its own."""
    ranks = range(len(crew.places))
    with owned_folder("ranks") as folder, _quiet_agent():
        meeting = Meeting(folder)
        handler = _rendezvous(meeting)
        agent = _agent(handler, len(ranks), entry(meeting))

        def pids() -> Mapping[int, int]:
            found = {worker.local_rank: worker.id for worker in agent.get_worker_group().workers}
            return found if all(one is not None for one in found.values()) else {}

        with Watch(meeting, len(ranks), pids, crew.step_timeout, crew.asked) as watch:
            try:
                result = agent.run()
            except KeyboardInterrupt as error:
                raise Failed(Interrupted("stopped at once"), meeting.run()) from error
            finally:
                handler.shutdown()
        cause = _cause(crew, meeting, watch, result)
        if cause is not None:
            raise Failed(cause, meeting.run())
        word = meeting.last_word(0)
        assert word is not None, "a rank without a last word has failed"
        return word


def _rendezvous(meeting: Meeting) -> RendezvousHandler:
    """For the agent, which could have others on other machines; here it is alone."""
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=str(meeting.folder / "agent"),
        run_id="gpipe",
        min_nodes=1,
        max_nodes=1,
        local_addr=ADDRESS,
        store_type="file",
    )
    return get_rendezvous_handler(parameters)


def _agent(handler: RendezvousHandler, ranks: int, arguments: Sequence[str]) -> LocalElasticAgent:
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        entrypoint=sys.executable,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=0,
        local_addr=ADDRESS,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull), shutdown_timeout=SHUTDOWN)


def _cause(crew: Crew, meeting: Meeting, watch: Watch, result: RunResult) -> GpipeError | None:
    if watch.late:
        assert crew.step_timeout is not None
        names = [f"rank {rank} ({crew.places[rank]})" for rank in watch.late]
        return frozen(names, watch.stopped, crew.step_timeout)
    return failure(
        [
            End(
                rank,
                place,
                signal=None if rank in watch.killed else _signal(result, rank),
                died=watch.deaths.get(rank, float("inf")),
                word=meeting.last_word(rank),
            )
            for rank, place in enumerate(crew.places)
        ]
    )


def _signal(result: RunResult, rank: int) -> int | None:
    code = result.failures[rank].exitcode if rank in result.failures else 0
    return -code if code < 0 else None


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """The environment the agent needs, and none of its log: what it would say is said better here."""
    log, nowhere = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    propagated, before = log.propagate, {name: os.environ.get(name) for name in OF_THE_AGENT}
    os.environ.update(OF_THE_AGENT)
    log.propagate = False
    log.addHandler(nowhere)
    try:
        yield
    finally:
        log.propagate = propagated
        log.removeHandler(nowhere)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
