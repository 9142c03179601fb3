"""`torchrun --rdzv-backend gpipe`: torch's c10d rendezvous, on one network interface instead of all of them.

torchrun finds this module by the entry point in pyproject.toml. Four things differ from `--rdzv-backend c10d`:
the host whose address the endpoint is takes the store without being told (`is_host`), every host offers the address
from which it reaches the endpoint (`--local-addr`), the stores listen on no other address, and a host that waits in
vain prints one line that names those that have joined.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from gpipe_cli.errors import ConfigError, GpipeError, PeerError
from gpipe_cli.launch.interfaces import (
    address_for_others,
    address_towards,
    listen_on,
    resolve,
    wait_for_listener,
)
from gpipe_cli.launch.rank import leave_exit_code
from gpipe_cli.report.formatting import one_line
from gpipe_cli.report.output import print_status

if TYPE_CHECKING:  # torchrun loads this module whichever backend it uses
    from collections.abc import Callable, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not re-exported
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters

    HandlerOf = Callable[[RendezvousParameters], RendezvousHandler]

PORT = 29500
READ_SECONDS = 60
"""How long a host waits for an answer of the store; `--rdzv-conf read_timeout=...` changes it."""
JOIN_SECONDS = 300
"""How long a host waits for the others; `--rdzv-conf join_timeout=...` changes it."""
LINGER_SECONDS = 5


def entry_point() -> HandlerOf:
    """What torchrun calls to register the backend."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    try:
        return make_handler(parameters)
    except GpipeError as error:
        _end_torchrun(error)


def make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # public, but not re-exported
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

    host, port = _endpoint(parameters.endpoint)
    if parameters.max_nodes > 1:
        host = address_for_others(host)
    listener = listen_on(host, port)
    if parameters.local_addr is None:
        parameters.local_addr = address_towards(host, port)
    seconds = parameters.get_as_int("join_timeout", JOIN_SECONDS) or JOIN_SECONDS
    parameters.config["join_timeout"] = str(seconds)
    try:
        if listener is None:
            wait_for_listener(host, port, seconds)
        store = TCPStore(
            host,
            port,
            is_master=listener is not None,
            multi_tenant=True,
            timeout=timedelta(seconds=parameters.get_as_int("read_timeout", READ_SECONDS) or READ_SECONDS),
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (OSError, DistError) as error:
        hint = "start the run on that host too, or check that this one reaches it"
        reason = f"{host}:{port}: {one_line(str(error))}, for join_timeout={seconds} seconds; {hint}"
        raise PeerError(reason) from error
    # Ranks inherit the environment. The store that torchrun would share with them listens on all interfaces, and keeps
    # the keys of failed attempts. Without it, rank 0 of every attempt makes a new one.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    class Backend(C10dRendezvousBackend):
        @property
        def name(self) -> str:  # torch insists that it is the one that was asked for
            return parameters.backend

    backend = Backend(store, parameters.run_id)
    handler = dynamic_rendezvous.create_handler(store, backend, parameters)
    handler.next_rendezvous = partial(  # type: ignore[method-assign]
        _meet, handler.next_rendezvous, handler, store, parameters, holds_store=listener is not None
    )
    return handler


def _meet(
    next_rendezvous: Callable[[], RendezvousInfo],
    handler: RendezvousHandler,
    store: Store,
    parameters: RendezvousParameters,
    *,
    holds_store: bool,
) -> RendezvousInfo:
    """Wait for the other hosts; if they do not come, end torchrun with a line that names those that have."""
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousGracefulExitError

    key = f"gpipe/{parameters.run_id}"
    try:
        own = f"{key}/{store.add(key, 1)}"
        store.set(own, f"{socket.gethostname()} {parameters.local_addr}")
        met = next_rendezvous()
        store.delete_key(own)
        return met
    except RendezvousGracefulExitError:
        raise
    except (RendezvousError, RuntimeError) as error:
        reason = f"{parameters.endpoint}: lost the rendezvous: {one_line(str(error))}"
        with suppress(RuntimeError):
            entries = [f"{key}/{number + 1}" for number in range(store.add(key, 0))]
            waiting = [entry for entry in entries if store.check([entry])]
            reason = _missing(parameters, [store.get(entry).decode().split() for entry in waiting])
            store.set(f"{own}/knows", "")
            if holds_store:  # the store ends with this process: let the others read who is missing
                handler.shutdown()
                store.wait([f"{entry}/knows" for entry in waiting], timedelta(seconds=LINGER_SECONDS))
        _end_torchrun(PeerError(reason))


def _missing(parameters: RendezvousParameters, joined: Sequence[Sequence[str]]) -> str:
    """joined: name and address of each host."""
    expected = [host for host in str(parameters.get("hosts", "")).split("/") if host]
    missing = [host for host in expected if not any(_is_host(host, *names) for names in joined)]
    return (
        f"{len(joined)} of {parameters.min_nodes} hosts have joined within join_timeout="
        f"{parameters.get('join_timeout')} seconds: {', '.join(name for name, _ in joined)}"
        f"{'; missing: ' if missing else ''}{', '.join(missing)}; start the run on the others too, check that they "
        f"reach {parameters.endpoint}, or let hosts wait longer (torchrun --rdzv-conf join_timeout=...)"
    )


def _is_host(given: str, name: str, address: str) -> bool:
    """Whether the user's name for a host means the one with this name and address."""
    with suppress(ConfigError):
        if address in (given, resolve(given, 0, socket.SOCK_STREAM)[4][0]):
            return True
    return given.partition(".")[0] == name.partition(".")[0]


def _end_torchrun(error: GpipeError) -> NoReturn:
    """Print one line and exit; torchrun would print a traceback."""
    print_status(f"gpipe: error: {error}")
    leave_exit_code(error)
    raise SystemExit(error.exit_code)


def _endpoint(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.strip().rpartition(":") if ":" in endpoint else (endpoint, "", str(PORT))
    if not host or not port.isdecimal():
        raise ConfigError(
            f"--rdzv-endpoint={endpoint}: give the address of one host, such as 10.0.0.1:{PORT}"
        )
    return host.strip("[]"), int(port)
