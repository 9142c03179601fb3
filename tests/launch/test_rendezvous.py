from __future__ import annotations

import errno
import os
import re
import socket
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

import gpipe_cli
from gpipe_cli.errors import ConfigError
from gpipe_cli.launch import interfaces
from gpipe_cli.launch.interfaces import (
    address_for_others,
    address_of_interface,
    address_towards,
    interface_of_address,
    is_connected,
    listen_on,
)
from gpipe_cli.launch.rank import EXIT_CODE_FILE
from gpipe_cli.launch.rank_monitor import choose_interface
from gpipe_cli.launch.rendezvous import create_handler, entry_point, make_handler


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def parameters(endpoint: str, nodes: int = 1) -> RendezvousParameters:
    return RendezvousParameters("gpipe", endpoint, run_id="x", min_nodes=nodes, max_nodes=nodes)


def test_the_entry_point_that_torchrun_reads_is_this_function() -> None:
    project = tomllib.loads((Path(gpipe_cli.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["torchrun.handlers"]["gpipe"]
    assert named == f"{entry_point.__module__}:{entry_point.__name__}" and entry_point() is create_handler


def test_the_host_of_the_endpoint_takes_the_store_on_that_address_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, given = free_port(), parameters("127.0.0.1:0")
    given.endpoint = f"127.0.0.1:{port}"
    handler = create_handler(given)
    assert handler.get_backend() == "gpipe" and given.local_addr == "127.0.0.1"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")] == [
        f"0100007F:{port:04X}"
    ]
    assert create_handler(parameters(f"127.0.0.1:{port}")).get_backend() == "gpipe", (
        "a client of the same store"
    )


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, ("lo", "=lo")),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, ("eth7", None)),
        ({"WORLD_SIZE": "2"}, ("lo", "=lo")),
        ({"WORLD_SIZE": "2", "RANK": "1"}, ("lo", "=lo")),
    ],
)
def test_ranks_use_the_interface_that_leads_to_rank_0_unless_the_user_named_one(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], chosen: tuple[str, str | None]
) -> None:
    """gloo uses the loopback interface if the name of its host cannot be resolved, and then meets no other host."""
    ranks = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**ranks, **given}.items():
        monkeypatch.setenv(name, value)
    if "GLOO_SOCKET_IFNAME" in given:
        monkeypatch.setenv("WORLD_SIZE", "2")
    choose_interface()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ.get("NCCL_SOCKET_IFNAME")) == chosen


@pytest.mark.parametrize("endpoint", ["", ":29500", "10.0.0.1:x"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=f"--rdzv-endpoint={endpoint}: give the address of one host"):
        make_handler(parameters(endpoint))


def test_a_name_that_means_loopback_here_is_refused_for_several_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian's /etc/hosts gives a machine's own name 127.0.1.1: no other host would have found the store."""

    def resolve(*_: Any, **__: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(
        ConfigError, match=r"node0: is 127\.0\.1\.1 here, which no other host reaches; give torchrun"
    ):
        make_handler(parameters("node0:29500", nodes=2))
    with pytest.raises(ConfigError, match="which no other host reaches"):
        address_for_others("node0")


@pytest.mark.parametrize(
    ("name", "addresses", "chosen"),
    [
        ("node0", ["10.0.0.1"], "10.0.0.1"),
        (
            "node0",
            ["10.0.0.1", "192.0.2.1"],
            r"no other host reaches \(this one has 10\.0\.0\.1, 192\.0\.2\.1\)",
        ),
        ("localhost", ["10.0.0.1"], "which no other host reaches; give torchrun an address"),
    ],
)
def test_the_own_name_means_the_only_address_that_others_reach(
    monkeypatch: pytest.MonkeyPatch, name: str, addresses: list[str], chosen: str
) -> None:
    loopback = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [loopback])
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    monkeypatch.setattr(
        interfaces, "address_of_interface", dict(enumerate(["127.0.0.1", None, *addresses])).get
    )
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(0, index) for index in range(len(addresses) + 2)])
    if chosen in addresses:
        assert address_for_others(name) == chosen
    else:
        with pytest.raises(ConfigError, match=chosen):
            address_for_others(name)


def test_a_host_that_waits_in_vain_prints_who_has_joined_and_ends_torchrun(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch waited for 610 seconds and printed a traceback that named nobody."""
    port, code = free_port(), tmp_path / "code"
    monkeypatch.setenv(EXIT_CODE_FILE, str(code))
    monkeypatch.setattr(socket, "gethostname", lambda: "node0.cluster")
    given = RendezvousParameters(
        *("gpipe", f"127.0.0.1:{port}"),
        run_id="x",
        min_nodes=2,
        max_nodes=2,
        join_timeout="1",
        hosts="node0/127.0.0.1/node1/node2",
    )
    with pytest.raises(SystemExit) as ended:
        create_handler(given).next_rendezvous()
    line = (
        "gpipe: error: 1 of 2 hosts have joined within join_timeout=1 seconds: node0.cluster; missing: node1, node2; "
        f"start the run on the others too, check that they reach 127.0.0.1:{port}, or let hosts wait longer "
        "(torchrun --rdzv-conf join_timeout=...)\n"
    )
    assert (ended.value.code, capsys.readouterr().err, code.read_text()) == (7, line, "7")
    given.endpoint = "no such name:1"
    with pytest.raises(SystemExit) as ended:
        create_handler(given)
    assert ended.value.code == 2 and "no such name: no such host" in capsys.readouterr().err
    given.endpoint = f"192.0.2.77:{port}"
    monkeypatch.setattr(socket, "create_connection", fail_to_connect)
    with pytest.raises(SystemExit):
        create_handler(given)
    assert re.fullmatch(
        rf"gpipe: error: 192\.0\.2\.77:{port}: .*refused, for join_timeout=1 seconds; start the run on that host .*\n",
        capsys.readouterr().err,
    )


def fail_to_connect(*_: Any) -> Any:
    raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def test_hosts_that_meet_are_no_longer_waiting() -> None:
    port = free_port()
    handlers = [create_handler(parameters(f"127.0.0.1:{port}", nodes=2)) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        met = list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
    assert sorted(info.rank for info in met) == [0, 1]
    assert not any(met[0].store.check([f"gpipe/x/{number}"]) for number in (1, 2))
    for handler in handlers:
        handler.shutdown()


def test_interfaces_and_addresses_of_this_machine() -> None:
    assert is_connected("lo") and not is_connected("nonesuch")
    assert address_of_interface("lo") == "127.0.0.1" and interface_of_address("127.0.0.1") == "lo"
    assert address_of_interface("nonesuch") is None and interface_of_address("192.0.2.77") is None
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"


def test_listening_where_it_cannot() -> None:
    assert listen_on("192.0.2.77", 1) is None, "the address of another host"
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert listen_on("127.0.0.1", other.getsockname()[1]) is None
    with pytest.raises(ConfigError, match="no such host"):
        listen_on("no such name", 1)
