"""Several hosts on one machine: network namespaces that a bridge connects, each with a host name of its own.

    with network_hosts(2) as hosts:
        hosts[0].start("torchrun", ...)
        hosts[1].cut()

Everything is removed at the end, and whatever still runs in a namespace is killed.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest

IN_HOST = 'hostname "$1" && ip link set lo up && mount --make-rprivate / && shift && exec "$@"'
"""Host names and mounts are per process tree, so each process that is started in a host sets them."""
LINK = Path(__file__).with_name("slow_link.py")
NETWORK = "10.213.7"
"""No packet leaves the namespaces, so the numbers are free."""


@final
@dataclass(frozen=True)
class Host:
    name: str
    address: str
    namespace: str
    switch: str
    """The namespace of the bridge, and the name of this host's port on it."""

    def words(self, *command: str) -> list[str]:
        """A command line that runs a command in this host."""
        inside = ["unshare", "--uts", "--mount", "sh", "-ec", IN_HOST, "sh", self.name, *command]
        return ["ip", "netns", "exec", self.namespace, *inside]

    def start(self, *command: str, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command; its output is appended to a file with the name of this host."""
        with self.output(folder).open("ab") as output:
            return subprocess.Popen(
                self.words(*command),
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def output(self, folder: Path) -> Path:
        return folder / f"{self.name}.txt"

    def cut(self) -> None:
        """Take the link down, as if somebody pulled the cable."""
        _run("ip", "-n", self.switch, "link", "set", self.name, "down")

    def lose_packets_to(self, other: Host) -> None:
        """Send what is for another host to an Ethernet address that nobody has."""
        nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
        _run("ip", "-n", self.namespace, "neighbor", "replace", other.address, *nobody, "dev", "eth0")

    @contextmanager
    def slow(self, seconds: float, loss: float) -> Iterator[None]:
        """Inside, a link replaces this host's own that delays packets in both directions and loses a part of them."""
        try:
            for namespace in (self.switch, self.namespace):
                _run("ip", "-n", namespace, "tuntap", "add", "slow", "mode", "tap")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine does not let us make TAP devices: {error}")
        words = [sys.executable, str(LINK), "slow", self.namespace, "slow", str(seconds), str(loss)]
        with subprocess.Popen(["ip", "netns", "exec", self.switch, *words], stdout=subprocess.PIPE) as link:
            try:
                assert link.stdout is not None and link.stdout.readline() == b"ready\n"
                _run("ip", "-n", self.switch, "link", "set", "slow", "master", "bridge", "up")
                _run("ip", "-n", self.namespace, "address", "flush", "dev", "eth0")
                _run("ip", "-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "slow")
                _run("ip", "-n", self.namespace, "link", "set", "slow", "up")
                yield
            finally:
                link.kill()

    def processes(self) -> list[int]:
        return [int(line) for line in _run("ip", "netns", "pids", self.namespace).split()]

    def listening(self) -> list[str]:
        """Addresses and ports on which a process in this host listens."""
        lines = _run(*self.words("ss", "-Hltun")).splitlines()
        return [line.split()[4] for line in lines]


@contextmanager
def network_hosts(count: int) -> Iterator[Sequence[Host]]:
    """Hosts node0, node1, ... on one network; skips the test where that is not permitted."""
    tag = secrets.token_hex(3)
    switch = f"gpipe-{tag}-switch"
    hosts = [
        Host(f"node{index}", f"{NETWORK}.{index + 1}", f"gpipe-{tag}-{index}", switch)
        for index in range(count)
    ]
    made: list[str] = []
    try:
        try:
            for name in (switch, *(host.namespace for host in hosts)):
                _run("ip", "netns", "add", name)
                made.append(name)
            _connect(hosts, switch)
            _run(*hosts[0].words("true"))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this machine does not let us make network namespaces: {error}")
        yield hosts
    finally:
        for host in hosts:
            if host.namespace in made:
                for process in host.processes():
                    os.kill(process, signal.SIGKILL)
        for name in made:
            _run("ip", "netns", "delete", name)


def _connect(hosts: Sequence[Host], switch: str) -> None:
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    for host in hosts:
        peer = ("peer", "name", "eth0", "netns", host.namespace)
        _run("ip", "-n", switch, "link", "add", host.name, "type", "veth", *peer)
        _run("ip", "-n", switch, "link", "set", host.name, "master", "bridge", "up")
        _run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", host.namespace, "link", "set", device, "up")


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)
        raise
