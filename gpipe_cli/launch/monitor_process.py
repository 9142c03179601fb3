"""The monitor of a rank that torchrun started: a process beside it, which sees what a waiting rank cannot.

A rank that waits for a peer behind a cut link is inside a call of torch that nothing can interrupt, and a frozen one
runs no code at all; torchrun itself waits for its store. The monitor exchanges heartbeats with those of the other
ranks. When one of them is lost, it tells its rank, kills it if it does not end, writes the reason for it, and ends
torchrun if torchrun does not. It imports no torch.

The monitors of all ranks connect to that of rank 0, over TCP. Messages are lines of JSON. The first of each connection
carries a token that the ranks got through the store of torch.distributed; whoever does not know it is disconnected.
"""

from __future__ import annotations

import hmac
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from gpipe_cli.errors import GpipeError, PeerError
from gpipe_cli.launch.interfaces import interface_of_address, listen_on, unanswered_addresses
from gpipe_cli.launch.rank import leave_exit_code, leave_reason
from gpipe_cli.launch.rank_files import NOT_IN_STEP, Heartbeats, RankFiles
from gpipe_cli.launch.rank_states import (
    DIED,
    ERRORS_BY_EXIT_CODE,
    MISSED_SECONDS,
    RankStates,
    RankStatus,
    Surroundings,
    is_suspended,
    process_state,
)
from gpipe_cli.process_lifetime import AwakeClock, signal_with_parent, temporary_folder
from gpipe_cli.report.output import print_status
from gpipe_cli.runs.directory import write_outcome
from gpipe_cli.safe_files import open_regular

POLL_SECONDS = 0.25
BEAT_SECONDS = 0.5
STUCK_SECONDS = 3.0
"""How long a rank has to notice the verdict by itself; one that waits for a lost peer never does."""
CLOSING_SECONDS = 6.0
"""How long a rank has that has noticed, to write its log and its report."""
AGENT_SECONDS = 4.0
"""How long torchrun has to end after its rank, or to notice that the rank has ended if it may restart it."""
MAX_MONITOR_LINE = 2**16
READ_BYTES = 2**16
SELDOM_SECONDS = 10.0
DAY_MILLISECONDS = 86_400_000
KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 1),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_USER_TIMEOUT, DAY_MILLISECONDS),
)
"""Probe every second, and leave it to the monitor to give up. A kernel answers even while its monitor is stopped."""
LAST_ACK = struct.Struct("=56xI")
"""In C's struct tcp_info: for how many milliseconds the peer has acknowledged nothing."""


@final
@dataclass(frozen=True)
class MonitorTask:
    rank: int
    size: int
    rank_process: int
    agent_process: int
    """torchrun's own process; 0 if another program started the rank."""
    restarts_left: int
    token: str
    address: str
    """The address of the monitor of rank 0."""
    port: int
    """0 in rank 0, whose monitor chooses it."""
    silence: float
    step_timeout: float | None
    prints: bool
    """Whether this is the first rank of its host: the only one there that reports the loss of rank 0."""


def main() -> None:
    """Read the task from stdin, answer with the folder and the port, and watch until the rank has ended."""
    task = MonitorTask(**json.loads(sys.stdin.readline()))
    signal_with_parent(
        task.rank_process, signal.SIGCONT
    )  # a monitor that is stopped must not outlive its rank
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # they are for the rank, and the monitor ends when the rank does
    with temporary_folder("monitor") as folder:
        try:
            monitor = _Monitor(task, RankFiles(folder))
        except OSError:
            return  # the rank has ended, or cannot be connected: it notices that there is no answer
        monitor.run()


@final
class _Monitor:
    def __init__(self, task: MonitorTask, files: RankFiles) -> None:
        self._task, self._files = task, files
        self._heartbeats = Heartbeats(files.heartbeats, task.size)
        self._clock = AwakeClock()
        self._rank_ends = os.pidfd_open(task.rank_process)
        self._agent_ends = os.pidfd_open(task.agent_process) if task.agent_process else None
        self._hosts = dict.fromkeys(range(task.size), "a host that has not connected")
        self._hosts[task.rank] = socket.gethostname()
        self._link = self._connect()

    def run(self) -> None:
        next_beat = 0.0
        while True:
            now = self._clock.tick()
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._link.beat(self._status(), now)
            verdict = self._link.verdict(now)
            if verdict is not None:
                self._end(verdict)
                return
            if self._link.finished:
                self._link.close()
                return
            self._link.poll(POLL_SECONDS, now)

    def _connect(self) -> Hub | Spoke:
        task = self._task
        if task.rank:
            greeting = {"token": task.token, "rank": task.rank, "host": self._hosts[task.rank]}
            connected = socket.create_connection((task.address, task.port), timeout=task.silence)
            self._tell_rank({"folder": str(self._files.folder), "port": task.port})
            return Spoke(connected, greeting, task.silence, self._surroundings(connected))
        listener = listen_on(task.address, 0)
        assert listener is not None, "the address is one of this machine"
        self._tell_rank({"folder": str(self._files.folder), "port": listener.getsockname()[1]})
        states = RankStates(
            task.size,
            silence=task.silence,
            step_timeout=task.step_timeout,
            surroundings=self._surroundings(listener),
        )
        states.addresses[task.address] = self._hosts[0]
        return Hub(listener, task.token, states, self._hosts)

    def _surroundings(self, own: socket.socket) -> Surroundings:
        interface = interface_of_address(str(own.getsockname()[0]))
        return Surroundings(self._task.rank, self._hosts, self._describe, interface)

    def _describe(self, rank: int) -> str:
        part = self._files.read_descriptions()
        return f"{part[rank]} on {self._hosts[rank]}" if part else f"on {self._hosts[rank]}"

    def _status(self) -> RankStatus:
        # Whether it has ended comes first: it writes its report before.
        ended = _wait_for_end(self._rank_ends, 0)
        step_began = self._heartbeats.read()[self._task.rank]
        takes_long = step_began != NOT_IN_STEP and time.monotonic() - step_began > MISSED_SECONDS
        return RankStatus(
            step_began,
            is_suspended(self._task.rank_process),
            self._files.read_exit_report(self._task.rank),
            DIED if ended else "",
            unanswered_addresses() if takes_long else (),
        )

    def _tell_rank(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # it may have ended
            os.write(1, json.dumps(message).encode() + b"\n")

    def _end(self, verdict: GpipeError) -> None:
        task = self._task
        self._tell_rank({"verdict": [verdict.exit_code, str(verdict)]})
        if self._link.reached_alone and task.prints:
            print_status(f"gpipe: error: {verdict}")
        ended = _wait_for_end(self._rank_ends, STUCK_SECONDS)
        report = self._files.read_exit_report(task.rank)
        if not ended and report is not None:
            ended = _wait_for_end(self._rank_ends, CLOSING_SECONDS - STUCK_SECONDS)
        if not ended:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._rank_ends, signal.SIGKILL)
            _wait_for_end(self._rank_ends, STUCK_SECONDS)
        if not ended or report is None:
            self._speak_for_rank(verdict)
        self._end_agent()

    def _speak_for_rank(self, verdict: GpipeError) -> None:
        """Write what the rank would have written if it could."""
        rank, run = self._task.rank, self._files.read_run_directory()
        leave_exit_code(verdict)
        leave_reason(f"gpipe: error: {verdict}", of_another=isinstance(verdict, PeerError))
        if rank == 0:
            print_status(f"gpipe: error: {verdict}")
        if run is None:
            return
        if rank == 0:
            write_outcome(run, verdict)
        log = run / (f"logs/rank-{rank}.log" if rank else "train.log")
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR the run ends here: {verdict}\n"
        with suppress(OSError):  # a full disk; the line is on the console
            descriptor = open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, base=run)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)

    def _end_agent(self) -> None:
        """Kill torchrun if it waits for a store that does not answer: no signal that it handles reaches it then."""
        if self._agent_ends is None or _wait_for_end(self._agent_ends, AGENT_SECONDS):
            return
        # With restarts left it goes on, but it must have noticed that its rank has ended. The kernel keeps the
        # state of a dead child until its parent asks.
        if self._task.restarts_left and process_state(self._task.rank_process) != "Z":
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._agent_ends, signal.SIGKILL)


def _wait_for_end(pidfd: int, seconds: float) -> bool:
    """Wait for the end of a process; whether it has ended."""
    return bool(select.select([pidfd], [], [], seconds)[0])


def is_torchrun(process: int) -> bool:
    """Whether a process is torchrun; the parent of a rank may be another program that uses torch's agent."""
    with suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes()
        return b"torchrun" in words or b"torch.distributed.run" in words
    return False


def task_line(task: MonitorTask) -> str:
    return json.dumps(asdict(task)) + "\n"


@final
class Connection:
    """A socket that sends and receives lines of JSON without ever waiting."""

    def __init__(self, open_socket: socket.socket) -> None:
        open_socket.setblocking(False)
        open_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            open_socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self.socket = open_socket
        self.rank: int | None = None
        """The rank of the peer, once it has shown the token."""
        self._received = b""
        self._beat_at = 0.0

    def beat(self, message: Mapping[str, Any], now: float, *, silent: bool) -> None:
        """Send a heartbeat; seldom while the peer is silent, because a monitor that is stopped reads nothing."""
        if not silent or now - self._beat_at > SELDOM_SECONDS:
            self._beat_at = now
            self.send(message)

    def send(self, message: Mapping[str, Any]) -> None:
        # A peer that is stopped fills the buffer after hours of heartbeats.
        with suppress(OSError):
            self.socket.send(json.dumps(message).encode() + b"\n")

    def unanswered_seconds(self) -> float:
        """For how long the host of the peer, whose monitor may be stopped, has not answered."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_ACK.size)
        return float(LAST_ACK.unpack(info)[0]) / 1000

    def receive(self) -> Iterator[Any]:
        """The messages that have arrived; ConnectionError at the end of the connection."""
        with suppress(BlockingIOError):
            received = self.socket.recv(READ_BYTES)
            if not received:
                raise ConnectionError("closed by the peer")
            *lines, self._received = (self._received + received).split(b"\n")
            if len(self._received) > MAX_MONITOR_LINE:
                raise ConnectionError("the line is too long")
            yield from map(json.loads, lines)


@final
class Hub:
    """The end at rank 0: it hears of all ranks, reaches a verdict, and tells all."""

    reached_alone = False
    """Whether this monitor reached the verdict without that of rank 0."""

    def __init__(
        self, listener: socket.socket, token: str, states: RankStates, hosts: dict[int, str]
    ) -> None:
        """hosts: filled in with the name of each rank's host."""
        self._listener, self._token, self._states, self._hosts = listener, token, states, hosts
        self._connections: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def finished(self) -> bool:
        return self._states.all_finished

    def poll(self, seconds: float, now: float) -> None:
        """Wait at most this long for messages."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data, now)

    def beat(self, status: RankStatus, now: float) -> None:
        self._states.hear(0, status, now)
        for rank, connection in self._connections.items():
            self._states.reach(rank, now - connection.unanswered_seconds())
            connection.beat({"host": self._hosts[0]}, now, silent=self._states.is_silent(rank, now))

    def verdict(self, now: float) -> GpipeError | None:
        verdict = self._states.verdict(now)
        if verdict is not None:
            for connection in self._connections.values():
                connection.send({"verdict": [verdict.exit_code, str(verdict)]})
        return verdict

    def close(self) -> None:
        for key in list((self._selector.get_map() or {}).values()):
            assert isinstance(key.fileobj, socket.socket), "nothing else is registered"
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        with suppress(OSError):
            accepted, _ = self._listener.accept()
            self._selector.register(accepted, selectors.EVENT_READ, Connection(accepted))

    def _read(self, connection: Connection, now: float) -> None:
        try:
            for message in connection.receive():
                if connection.rank is None:
                    self._welcome(connection, message)
                else:
                    self._states.hear(connection.rank, RankStatus.from_json(message), now)
        except (OSError, ValueError, TypeError, KeyError) as error:  # the last three: from a stranger
            self._selector.unregister(connection.socket)
            connection.socket.close()
            if connection.rank is not None:
                del self._connections[connection.rank]
                # Not if the network failed: the rank is then silent, and lost when it has been for long enough.
                if not isinstance(error, OSError) or isinstance(error, ConnectionError):
                    self._states.disconnect(connection.rank, now)

    def _welcome(self, connection: Connection, message: Any) -> None:
        rank = int(message["rank"])
        if not hmac.compare_digest(str(message["token"]), self._token) or rank in self._connections:
            raise ConnectionError("a stranger")
        connection.rank = rank
        self._hosts[rank] = str(message["host"])
        self._states.addresses[str(connection.socket.getpeername()[0])] = self._hosts[rank]
        self._connections[rank] = connection


@final
class Spoke:
    """The end at any other rank."""

    def __init__(
        self,
        connected: socket.socket,
        greeting: Mapping[str, Any],
        silence: float,
        surroundings: Surroundings,
    ) -> None:
        """greeting: the rank, its host and the token."""
        self._connection, self._silence, self._surroundings = Connection(connected), silence, surroundings
        self._heard_at = 0.0
        self._verdict: GpipeError | None = None
        self.reached_alone = False
        self.finished = False
        self._connection.send(greeting)

    def poll(self, seconds: float, now: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection.socket, selectors.EVENT_READ)
            if not selector.select(seconds):
                return
        try:
            for message in self._connection.receive():
                self._heard_at = now
                if "host" in message:
                    self._surroundings.hosts[0] = str(message["host"])
                if "verdict" in message:
                    exit_code, text = message["verdict"]
                    self._verdict = ERRORS_BY_EXIT_CODE.get(exit_code, PeerError)(text)
        except ConnectionError:
            self._lose(PeerError(f"{self._surroundings.names([0])}{DIED}"))
        except OSError:
            self._lose_host()

    def beat(self, status: RankStatus, now: float) -> None:
        self._connection.beat(status.to_json(), now, silent=now - self._heard_at > MISSED_SECONDS)
        self.finished = status.finished

    def verdict(self, now: float) -> GpipeError | None:
        if now - self._heard_at > self._silence and self._connection.unanswered_seconds() > self._silence:
            self._lose_host()
        return self._verdict

    def close(self) -> None:
        """Wait until rank 0's monitor has everything, and has closed its end too."""
        # A socket that is closed with unread heartbeats resets the connection, and a lost packet is not sent again.
        with suppress(OSError):
            self._connection.socket.shutdown(socket.SHUT_WR)
            self._connection.socket.settimeout(self._silence)
            while self._connection.socket.recv(READ_BYTES):
                pass
        self._connection.socket.close()

    def _lose(self, error: PeerError) -> None:
        if self._verdict is None:
            self.reached_alone, self._verdict = True, error

    def _lose_host(self) -> None:
        self._lose(self._surroundings.lost_error([0], self._silence, hears_others=False))
