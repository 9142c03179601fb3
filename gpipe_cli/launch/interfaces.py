"""Network interfaces of this machine: their addresses, the one that leads to another host, listening on only one."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import select
import socket
import struct
import time
from pathlib import Path

from gpipe_cli.errors import ConfigError

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # from <linux/sockios.h>
_IFF_RUNNING = 0x40  # from <linux/if.h>
_ADDRESS = slice(20, 24)
"""The place of the IPv4 address in a struct ifreq."""
BACKLOG = 1024
RETRY_SECONDS = 0.5
RETRANSMISSIONS = 3
"""After so many, which take more than a second, packets do not arrive or their acknowledgements do not."""


def address_of_interface(name: str) -> str | None:
    """The IPv4 address of a network interface; None if it has none, or if there is no such interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[_ADDRESS])


def is_connected(interface: str) -> bool:
    """Whether a network interface is up and has a carrier: a cable, and a switch that is on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return False
    return bool(struct.unpack_from("H", answer, 16)[0] & _IFF_RUNNING)


def interface_of_address(address: str) -> str | None:
    """The network interface that has an address; None if none has."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if address_of_interface(name) == address), None)


def address_towards(host: str, port: int) -> str:
    """The address from which this machine reaches a host. Sends nothing."""
    family, kind, _, _, address = resolve(host, port, socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            raise ConfigError(f"{host}: no network interface leads there: {error.strerror}") from error
        return str(probe.getsockname()[0])


def listen_on(host: str, port: int) -> socket.socket | None:
    """A socket that listens on one address; None if the address belongs to another host, or another process has it."""
    family, kind, _, _, address = resolve(host, port, socket.SOCK_STREAM)
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def unanswered_addresses() -> tuple[str, ...]:
    """The IPv4 addresses to which this machine sends the same data again and again."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    hexadecimal = {row[2].partition(":")[0] for row in rows if int(row[6], 16) >= RETRANSMISSIONS}
    return tuple(sorted(socket.inet_ntoa(struct.pack("=I", int(text, 16))) for text in hexadecimal))


def wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Wait until a process listens there; OSError if none does in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, port), max(1.0, deadline - time.monotonic())).close()
        except OSError:
            if time.monotonic() >= deadline:
                raise
            select.select([], [], [], RETRY_SECONDS)


def resolve(
    host: str, port: int, kind: socket.SocketKind
) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str | int, ...]]:
    """The first address of a host."""
    try:
        first = socket.getaddrinfo(host, port, type=kind)[0]
    except OSError as error:
        raise ConfigError(f"{host}: no such host: {error.strerror}") from error
    return first  # type: ignore[return-value]


def address_for_others(host: str) -> str:
    """The address of a host. /etc/hosts often gives a machine's own name a loopback address: not that one.

    Raises ConfigError if it is not clear which address the other hosts reach.
    """
    address = str(resolve(host, 0, socket.SOCK_STREAM)[4][0])
    if address == host or not ipaddress.ip_address(address).is_loopback:
        return address
    own = _addresses_for_others() if host in (socket.gethostname(), socket.getfqdn()) else []
    if len(own) == 1:
        return own[0]
    several = f" (this one has {', '.join(own)})" if own else ""
    raise ConfigError(
        f"{host}: is {address} here, which no other host reaches{several}; give torchrun an address, not a name "
        "(--rdzv-endpoint, --local-addr)"
    )


def _addresses_for_others() -> list[str]:
    addresses = {address_of_interface(name) for _, name in socket.if_nameindex()} - {None}
    return sorted(str(address) for address in addresses if not ipaddress.ip_address(str(address)).is_loopback)
