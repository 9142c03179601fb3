"""A rank that torchrun started, and its monitor: starts the monitor, and asks it which rank failed first."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, final

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, see torch's docs

from gpipe_cli.errors import ConfigError, GpipeError, PeerError, ResourceError
from gpipe_cli.launch.interfaces import (
    address_for_others,
    address_of_interface,
    address_towards,
    interface_of_address,
    listen_on,
)
from gpipe_cli.launch.monitor_process import CLOSING_SECONDS, MonitorTask, is_torchrun, task_line
from gpipe_cli.launch.rank_files import RankFiles
from gpipe_cli.launch.rank_states import ERRORS_BY_EXIT_CODE
from gpipe_cli.process_lifetime import die_with_parent

START = "import sys; sys.path[:] = sys.argv[1:]; from gpipe_cli.launch.monitor_process import main; main()"
KEY = "gpipe/monitor"
SHORTEST_SILENCE = 5.0
"""Seconds: with less, a busy machine or a network that loses packets would pass for a dead one."""
DEFAULT_SILENCE = 300.0
"""Without `step_timeout`."""
_stores: list[TCPStore] = []
"""The store of this process, once it is connected: rank 0 can listen on its port only once."""
_jobs = count()


@final
class RankMonitor:
    """The process that watches this rank, and the others through their monitors."""

    def __init__(self, process: subprocess.Popen[bytes], started: Any) -> None:
        self._process = process
        self.files = RankFiles(Path(started["folder"]))
        self.port = int(started["port"])

    def verdict(self) -> GpipeError | None:
        """Why the run ends, which the monitors find out within seconds; None if they do not."""
        message = _read(self._process, CLOSING_SECONDS)
        if message is None:
            return None
        exit_code, text = message["verdict"]
        return ERRORS_BY_EXIT_CODE.get(exit_code, PeerError)(text)


def connect_store(seconds: float) -> Store:
    """The store through which the ranks of torchrun meet, with keys of its own for each job of a sweep."""
    if not _stores:
        _stores.append(_make_store(seconds))
    # torchrun's own store keeps the keys of attempts that failed. A new store has none, and needs no number, on which
    # hosts may disagree: torchrun does not count a restart because of another host's.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if _torchrun_has_store() else "0"
    return PrefixStore(f"attempt-{attempt}/job-{next(_jobs)}", _stores[0])


def _torchrun_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _make_store(seconds: float) -> TCPStore:
    environment = os.environ
    host, port, rank = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), int(environment["RANK"])
    listener = None
    if rank == 0 and not _torchrun_has_store():
        # On one interface: torch's own store listens on all of them.
        listener = listen_on(host, port)
        if listener is None:
            raise ResourceError(f"MASTER_PORT={port}: another process listens there")
    return TCPStore(
        host,
        port,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=None if listener is None else listener.detach(),
    )


def start_monitor(store: Store, silence: float, step_timeout: float | None) -> RankMonitor:
    """Start the monitor of this rank, and connect it to that of rank 0."""
    environment, agent = os.environ, os.getppid()
    die_with_parent(agent)  # torchrun may be killed, and this rank may wait for a peer forever
    rank = int(environment["RANK"])
    restarts = [
        int(environment.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT")
    ]
    task = MonitorTask(
        rank=rank,
        size=int(environment["WORLD_SIZE"]),
        rank_process=os.getpid(),
        agent_process=agent if is_torchrun(agent) else 0,
        restarts_left=restarts[0] - restarts[1],
        token="",
        address="",
        port=0,
        silence=silence,
        step_timeout=step_timeout,
        prints=environment.get("LOCAL_RANK") == "0",
    )
    if rank:
        shared = json.loads(store.get(KEY))
        return _start(replace(task, **shared))
    task = replace(task, token=secrets.token_hex(16), address=_own_address())
    monitor = _start(task)
    store.set(KEY, json.dumps({"token": task.token, "address": task.address, "port": monitor.port}))
    return monitor


def silence_of(step_timeout: float | None) -> float:
    """How long the monitor of a rank may be silent until the rank counts as lost."""
    return DEFAULT_SILENCE if step_timeout is None else max(step_timeout, SHORTEST_SILENCE)


def _start(task: MonitorTask) -> RankMonitor:
    process = subprocess.Popen(
        [sys.executable, "-c", START, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # `select` sees only what no buffer holds
        start_new_session=True,  # signals of a terminal or of torchrun are for the rank
    )
    assert process.stdin is not None, "it is a pipe"
    process.stdin.write(task_line(task).encode())
    process.stdin.close()
    started = _read(process, task.silence)
    if started is None:
        raise PeerError(
            f"rank {task.rank} cannot reach rank 0 at {task.address}:{task.port}; check that the network lets hosts "
            "connect to each other on any port, and which interface GLOO_SOCKET_IFNAME names"
        )
    return RankMonitor(process, started)


def _read(process: subprocess.Popen[bytes], seconds: float) -> Any:
    """The next message of the monitor; None if it does not come in time."""
    assert process.stdout is not None, "it is a pipe"
    if not select.select([process.stdout], [], [], seconds)[0]:
        return None
    line = process.stdout.readline()
    return json.loads(line) if line else None


def choose_interface() -> None:
    """Have the ranks of torchrun use one network interface, unless the user has named one: that towards rank 0."""
    if os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:
        name = "lo"
    elif "GLOO_SOCKET_IFNAME" in os.environ:
        return
    else:
        host = os.environ["MASTER_ADDR"]
        here = address_for_others(host) if os.environ["RANK"] == "0" else address_towards(host, 1)
        name = interface_of_address(here) or ""
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault(
            "NCCL_SOCKET_IFNAME", f"={name}"
        )  # without the sign, NCCL takes it for a prefix


def _own_address() -> str:
    """Where the monitor of rank 0 listens."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not name:
        return address_for_others(os.environ["MASTER_ADDR"])
    address = address_of_interface(name)
    if address is None:
        raise ConfigError(f"GLOO_SOCKET_IFNAME={name}: no such network interface, or it has no IPv4 address")
    return address
