"""The connections between the monitors of ranks: those of all ranks connect to that of rank 0, over TCP.

Messages are lines of JSON. The first of each connection carries a token that the ranks got through the store of
torch.distributed; whoever does not know it is disconnected.
"""

from __future__ import annotations

import hmac
import json
import selectors
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, final

from gpipe_cli.errors import GpipeError, PeerError
from gpipe_cli.launch.rank_states import (
    DIED,
    ERRORS_BY_EXIT_CODE,
    MISSED_SECONDS,
    RankStates,
    RankStatus,
    Surroundings,
)

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
