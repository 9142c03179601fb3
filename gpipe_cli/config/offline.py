"""Keeps a model from being built out of the network: whatever a builder does by default, nothing is downloaded."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpipe_cli.errors import ConfigError

__all__ = ["offline"]


@contextmanager
def offline(what: str) -> Iterator[None]:
    """Inside, this thread opens no connection to another machine: it gets a ConfigError that names `what`."""
    builder = threading.get_ident()
    look_up, connect, connect_ex = socket.getaddrinfo, socket.socket.connect, socket.socket.connect_ex

    def refuse(address: Any) -> None:
        if threading.get_ident() == builder:  # loggers and process groups have threads of their own
            raise ConfigError(
                f"{what}: would connect to {address}; nothing is downloaded, give weights as a file"
            )

    def refusing_look_up(host: Any, *arguments: Any, **options: Any) -> Any:
        refuse(host)
        return look_up(host, *arguments, **options)

    def refusing_connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            refuse(address)
        connect(self, address)

    def refusing_connect_ex(self: socket.socket, address: Any) -> int:
        if self.family != socket.AF_UNIX:
            refuse(address)
        return connect_ex(self, address)

    # Every Python client ends in one of these three, whichever library it belongs to.
    sockets: Any = socket.socket
    socket.getaddrinfo = refusing_look_up
    sockets.connect, sockets.connect_ex = refusing_connect, refusing_connect_ex
    try:
        yield
    finally:
        socket.getaddrinfo = look_up
        sockets.connect, sockets.connect_ex = connect, connect_ex
