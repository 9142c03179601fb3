"""`torchrun --rdzv-backend gpipe`: torch's c10d rendezvous, on one network interface instead of all of them.

torchrun finds this module by the entry point in pyproject.toml. Three things differ from `--rdzv-backend c10d`:
the host whose address the endpoint is takes the store without being told (`is_host`), every host offers the address
from which it reaches the endpoint (`--local-addr`), and the stores listen on no other address.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from gpipe_cli.errors import ConfigError
from gpipe_cli.launch.interfaces import address_for_others, address_towards, listen_on

if TYPE_CHECKING:  # torchrun loads this module whichever backend it uses
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    HandlerOf = Callable[[RendezvousParameters], RendezvousHandler]

PORT = 29500
READ_SECONDS = 60
"""How long a host waits for the store; `--rdzv-conf read_timeout=...` changes it."""


def entry_point() -> HandlerOf:
    """What torchrun calls to register the backend."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

    host, port = _endpoint(parameters.endpoint)
    if parameters.max_nodes > 1:
        host = address_for_others(host)
    listener = listen_on(host, port)
    if parameters.local_addr is None:
        parameters.local_addr = address_towards(host, port)
    store = TCPStore(
        host,
        port,
        is_master=listener is not None,
        multi_tenant=True,
        timeout=timedelta(seconds=parameters.get_as_int("read_timeout", READ_SECONDS) or READ_SECONDS),
        master_listen_fd=None if listener is None else listener.detach(),
    )
    # Ranks inherit the environment. The store that torchrun would share with them listens on all interfaces, and keeps
    # the keys of failed attempts. Without it, rank 0 of every attempt makes a new one.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    class Backend(C10dRendezvousBackend):
        @property
        def name(self) -> str:  # torch insists that it is the one that was asked for
            return parameters.backend

    backend = Backend(store, parameters.run_id)
    return dynamic_rendezvous.create_handler(store, backend, parameters)


def _endpoint(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.strip().rpartition(":") if ":" in endpoint else (endpoint, "", str(PORT))
    if not host or not port.isdecimal():
        raise ConfigError(
            f"--rdzv-endpoint={endpoint}: give the address of one host, such as 10.0.0.1:{PORT}"
        )
    return host.strip("[]"), int(port)
