"""Several hosts that torchrun starts as docs/how-to/more-machines.md says, and what happens when one of them fails.

The hosts are network namespaces with links of their own, so links can be cut and packets delayed for real. Every
start takes many seconds, because each host imports torch twice, so all rows are slow.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import Tensor

import gpipe_cli
from gpipe_cli.runs.reader import run_state
from tests.support.fault_injection import TRAIN
from tests.support.faulty_ranks import FAULT, GO
from tests.support.network_hosts import Host, network_hosts
from tests.support.run_files import snapshot_tensors

TOP = Path(gpipe_cli.__file__).parents[1]
SECONDS = 240
"""Until a run counts as hanging; a busy machine takes long to import torch four times."""
STEP_TIMEOUT = 8
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(6 * SECONDS),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="ranks are watched as Linux lets us"),
]
ARGUMENTS = tuple(
    word.replace("tests.support.faulty.model", "tests.support.faulty_ranks.model") for word in TRAIN
)
LOST = r"not heard of for \d+ seconds"
DIED = "ended without a report: it was killed"


@dataclass(frozen=True)
class Cluster:
    hosts: Sequence[Host]
    folder: Path
    variables: Mapping[str, Mapping[str, str]]
    """Environment variables of single hosts, by name."""
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(
        self,
        *arguments: str,
        nodes: str = "",
        fault: str = "",
        restarts: int = 0,
        conf: str = "last_call_timeout=1",
        only: Sequence[Host] = (),
    ) -> None:
        nodes = nodes or str(len(self.hosts))
        given = {word.partition("=")[0] for word in arguments}  # a key is given once
        words = [*ARGUMENTS, "engine=processes", "run_dir=run", "resume=auto", f"step_timeout={STEP_TIMEOUT}"]
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-id=job1", "--rdzv-backend=gpipe"),
            *(f"--rdzv-endpoint={self.hosts[0].address}:29500", f"--max-restarts={restarts}"),
            f"--rdzv-conf={conf}",
            *(
                "-m",
                "gpipe_cli",
                *(word for word in words if word.partition("=")[0] not in given),
                *arguments,
            ),
        ]
        for host in only or self.hosts:
            path = f"{self.folder / 'installed'}:{TOP}"
            environment = {"PYTHONPATH": path, "TMPDIR": str(self.folder), FAULT: fault}
            own = dict(self.variables.get(host.name, {}))
            own["PYTHONPATH"] = f"{own.pop('PYTHONPATH', '')}:{path}".removeprefix(":")
            self.started.append(host.start(*command, folder=self.folder, environment={**environment, **own}))

    def wait_until(self, happened: Callable[[], bool], what: str) -> float:
        """Wait; return how many seconds it took."""
        began = time.monotonic()
        while not happened():
            assert time.monotonic() < began + SECONDS, f"{what} never happened\n{self.describe()}"
            signal.sigtimedwait([], 0.1)
        return time.monotonic() - began

    def wait_until_all_ended(self) -> float:
        seconds = self.wait_until(lambda: not any(host.processes() for host in self.hosts), "the end")
        for process in self.started:
            process.wait()
        return seconds

    def wait_until_paused(self) -> None:
        self.wait_until(lambda: any(self.folder.glob("paused.*")), "the third step")

    def output_of(self, host: Host) -> str:
        return host.output(self.folder).read_text()

    def describe(self) -> str:
        texts = [*self.folder.glob("*.txt"), *self.folder.rglob("*.log")]
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in texts)


@contextmanager
def cluster(
    count: int, folder: Path, variables: Mapping[str, Mapping[str, str]] | None = None
) -> Iterator[Cluster]:
    if not folder.exists():
        install_entry_point(folder / "installed")
    with network_hosts(count) as hosts:
        made = Cluster(hosts, folder, variables or {})
        try:
            yield made
        finally:
            for host in hosts:
                kill_all(host)
            for process in made.started:
                process.wait()


def kill_all(host: Host) -> None:
    """Like a power cut."""
    for process in host.processes():
        os.kill(process, signal.SIGKILL)


def install_entry_point(folder: Path) -> None:
    """torchrun finds gpipe's rendezvous in the metadata of installed packages; the tests may run without any."""
    points = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["entry-points"]
    metadata = folder / "gpipe_cli-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gpipe-cli\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in points.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def tensors_of(run: Path, step: int = 8) -> dict[str, Tensor]:
    return snapshot_tensors(run / "snapshots" / f"step-{step:08d}")


def assert_equal_to_one_process(run: Path, alone: Path) -> None:
    expected, trained = tensors_of(alone), tensors_of(run)
    assert expected and trained.keys() == expected.keys()
    assert [name for name in expected if not trained[name].equal(expected[name])] == []


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, without a fault."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "gpipe_cli", *ARGUMENTS, "engine=single", "run_dir=run"]
    subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(TOP)}, check=True, capture_output=True
    )
    return folder / "run"


def test_two_hosts_train_to_the_bits_of_one_process_and_listen_on_their_link_only(
    tmp_path: Path, alone: Path
) -> None:
    with cluster(2, tmp_path / "x") as two:
        two.start(fault="paused")
        two.wait_until_paused()
        assert_only_links_are_listened_on(two)
        (two.folder / GO).touch()
        two.wait_until_all_ended()
        assert (two.run / "summary.json").exists(), two.describe()
        assert_equal_to_one_process(two.run, alone)


def assert_only_links_are_listened_on(cluster: Cluster) -> None:
    listening = [address for host in cluster.hosts for address in host.listening()]
    own = {host.address for host in cluster.hosts}
    assert len(listening) >= 3 and {address.rpartition(":")[0] for address in listening} <= own, listening


def rank_of(host: Host) -> int:
    """The process id of the rank on a host; torchrun and the monitor have other command lines."""
    (rank,) = [
        process
        for process in host.processes()
        if b"-u\0-m\0gpipe_cli\0" in Path(f"/proc/{process}/cmdline").read_bytes()
    ]
    return rank


def cut_last(cluster: Cluster) -> None:
    cluster.hosts[-1].cut()


def cut_first(cluster: Cluster) -> None:
    cluster.hosts[0].cut()


def lose_one_way(cluster: Cluster) -> None:
    cluster.hosts[1].lose_packets_to(cluster.hosts[2])


def kill_first(cluster: Cluster) -> None:
    kill_all(cluster.hosts[0])


def kill_rank_0(cluster: Cluster) -> None:
    os.kill(rank_of(cluster.hosts[0]), signal.SIGKILL)


def freeze_rank_0(cluster: Cluster) -> None:
    os.kill(rank_of(cluster.hosts[0]), signal.SIGSTOP)


def nothing(cluster: Cluster) -> None:
    pass


@dataclass(frozen=True)
class Row:
    name: str
    act: Callable[[Cluster], None]
    """What happens to a host while one of its ranks is in the third step."""
    says: Mapping[int, str]
    """What the console of a host says, by its number."""
    fault: str = "paused"
    hosts: int = 2


def silent(here: int, rank: int) -> str:
    """What a host says of another that does not answer."""
    lost = rf"rank {rank} \(partition {rank} on node{rank}\): {LOST}"
    return rf"error: {lost}; node{rank} is down, or the network between node{here} and node{rank} is cut"


def cut_off(here: int, *ranks: int) -> str:
    """What a host says whose own link is cut."""
    names = " and ".join(rf"rank {rank} \(partition {rank} on node{rank}\)" for rank in ranks)
    return rf"error: the network link eth0 of node{here} is down; {names}: {LOST}"


ONE_WAY = (
    "error: the network between node1 and node2 is cut, in one direction or both: packets are not acknow"
)
STOPPED = r"\): stopped \(SIGSTOP, or a debugger\); no answer within step_timeout=8 seconds"
TABLE = [
    Row("a host is cut off", cut_last, {0: silent(0, 1), 1: cut_off(1, 0)}),
    Row("one of three is cut off", cut_last, {0: silent(0, 2), 2: cut_off(2, 0)}, hosts=3),
    Row(
        "the host of the store is cut off",
        cut_first,
        {0: cut_off(0, 1, 2), 1: silent(1, 0), 2: silent(2, 0)},
        hosts=3,
    ),
    Row("a link loses packets in one direction", lose_one_way, {0: ONE_WAY}, hosts=3),
    Row("the host of the store dies", kill_first, {1: rf"rank 0 \(partition 0 on node0\): {DIED}"}),
    Row("a rank is killed", nothing, {0: rf"error: rank 1 \(partition 1 on node1\): {DIED}"}, fault="killed"),
    Row("rank 0 is killed", kill_rank_0, {0: rf"error: rank 0 \(partition 0 on node0\): {DIED}"}),
    Row("a rank freezes", nothing, {0: r"error: rank 1 \(partition 1 on node1" + STOPPED}, fault="stopped"),
    Row("rank 0 freezes", freeze_rank_0, {0: r"error: rank 0 \(partition 0 on node0" + STOPPED}),
    Row(
        "a layer raises", nothing, {0: r"rank 1 \(partition 1 on node1\): ValueError: broken"}, fault="raises"
    ),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_failed_host_is_named_and_fewer_hosts_resume_the_run(tmp_path: Path, alone: Path, row: Row) -> None:
    folder = tmp_path / "x"
    with cluster(row.hosts, folder) as all_hosts:
        all_hosts.start(fault=row.fault)
        all_hosts.wait_until(lambda: (folder / "happened").exists(), "the third step")
        if row.fault == "paused":
            all_hosts.wait_until_paused()
            assert_only_links_are_listened_on(all_hosts)
        row.act(all_hosts)
        (folder / GO).touch()
        seconds = all_hosts.wait_until_all_ended()
        print(f"{row.name}: all processes ended after {seconds:.1f} s")  # noqa: T201 - pytest -rP shows it
        for number, expected in row.says.items():
            assert re.search(expected, all_hosts.output_of(all_hosts.hosts[number])), all_hosts.describe()
        state = run_state(all_hosts.run)
        assert state is not None and state.name != "finished"
        if 0 in row.says:
            assert state.name == "failed" and re.search(row.says[0].rpartition("error: ")[2], state.reason), (
                state
            )
            assert re.search(row.says[0].rpartition("error: ")[2], (all_hosts.run / "train.log").read_text())
    with cluster(row.hosts - 1, folder) as fewer:
        fewer.start()
        fewer.wait_until_all_ended()
        assert_equal_to_one_process(fewer.run, alone)


@pytest.mark.parametrize("host", [0, 1])
def test_a_monitor_that_is_stopped_neither_ends_a_run_nor_outlives_it(tmp_path: Path, host: int) -> None:
    with cluster(2, tmp_path / "x") as two:
        two.start("epochs=1000000", "snapshot.every=100000", "log.every=1000")
        two.wait_until((two.run / "metrics.jsonl").exists, "the first step")
        (monitor,) = [
            process
            for process in two.hosts[host].processes()
            if b"launch.monitor_process" in Path(f"/proc/{process}/cmdline").read_bytes()
        ]
        os.kill(monitor, signal.SIGSTOP)
        began = time.monotonic()
        two.wait_until(lambda: time.monotonic() > began + 3 * STEP_TIMEOUT, "time")
        assert [process.poll() for process in two.started] == [None, None], two.describe()
        for process in two.started:
            process.terminate()
        two.wait_until_all_ended()
        state = run_state(two.run)
        assert state is not None and state.name == "stopped", two.describe()


def test_a_host_that_does_not_join_is_named_by_all_that_did(tmp_path: Path) -> None:
    with cluster(3, tmp_path / "x") as three:
        names = "/".join(host.name for host in three.hosts)
        three.start(conf=f"join_timeout=20,hosts={names}", only=three.hosts[:2])
        three.wait_until_all_ended()
        assert [process.returncode for process in three.started] == [7, 7]
        for host in three.hosts[:2]:
            (line,) = three.output_of(host).splitlines()
            assert re.match(
                r"gpipe: error: 2 of 3 hosts have joined within join_timeout=20 seconds: node\d, node\d; "
                "missing: node2; start the run on the others too",
                line,
            ), line


def test_three_hosts_train_to_the_bits_of_one_process(tmp_path: Path, alone: Path) -> None:
    with cluster(3, tmp_path / "x") as three:
        three.start()
        three.wait_until_all_ended()
        assert (three.run / "summary.json").exists(), three.describe()
        assert_equal_to_one_process(three.run, alone)


def test_the_script_that_gpipe_prints_starts_two_hosts(tmp_path: Path, alone: Path) -> None:
    with cluster(2, tmp_path / "x") as two:
        hosts = f"hosts=[{','.join(host.address for host in two.hosts)}]"
        words = ["launch-script", "torchrun", hosts, "ranks_per_node=1", f"run_dir={two.run}", *ARGUMENTS[1:]]
        environment = {"PYTHONPATH": str(TOP), "TMPDIR": str(two.folder)}
        with (two.folder / "start.sh").open("w") as script:
            command = [sys.executable, "-m", "gpipe_cli", *words]
            subprocess.run(command, stdout=script, env={**os.environ, **environment}, check=True)
        for host in two.hosts:
            started = host.start("bash", "start.sh", folder=two.folder, environment=environment)
            two.started.append(started)
        two.wait_until_all_ended()
        assert (two.run / "summary.json").exists(), two.describe()
        assert_equal_to_one_process(two.run, alone)


def test_a_slow_network_that_loses_packets_is_no_failure(tmp_path: Path, alone: Path) -> None:
    with cluster(2, tmp_path / "x") as two, two.hosts[1].slow(seconds=0.2, loss=0.05):
        two.start("step_timeout=60")
        two.wait_until_all_ended()
        assert (two.run / "summary.json").exists(), two.describe()
        assert_equal_to_one_process(two.run, alone)


WRONG_CLOCK = """
import datetime, time
seconds, right = {seconds}, time.time
time.time = lambda: right() + seconds
class Wrong(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(right() + seconds, tz)
Wrong.__module__, Wrong.__name__, Wrong.__qualname__ = "datetime", "datetime", "datetime"  # for pickle
datetime.datetime = Wrong
"""


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_host_whose_clock_is_wrong_trains_like_any_other(tmp_path: Path, alone: Path, seconds: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK.format(seconds=seconds))
    with cluster(2, tmp_path / "x", {"node1": {"PYTHONPATH": str(tmp_path)}}) as two:
        two.start()
        two.wait_until_all_ended()
        assert (two.run / "summary.json").exists(), two.describe()
        assert_equal_to_one_process(two.run, alone)


def test_a_full_disk_ends_all_hosts_and_is_named(tmp_path: Path, alone: Path) -> None:
    with cluster(2, tmp_path / "x") as two, small_disk(two.run, kilobytes=256):
        two.start(fault="paused")
        two.wait_until_paused()
        fill = two.run / "fill"
        with pytest.raises(OSError, match="No space left"), fill.open("wb", buffering=0) as file:
            while file.write(b"x" * 512):
                pass
        (two.folder / GO).touch()
        two.wait_until_all_ended()
        assert re.search(r"gpipe: error: .*No space left on device", two.output_of(two.hosts[0])), (
            two.describe()
        )
        fill.unlink()
        two.start()
        two.wait_until_all_ended()
        assert_equal_to_one_process(two.run, alone)


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_run_that_may_restart_continues_on_the_hosts_that_are_left(tmp_path: Path, alone: Path) -> None:
    with cluster(2, tmp_path / "x") as two:
        two.start(
            "engine.max_restarts=2", nodes="1:2", fault="paused", restarts=2, conf="last_call_timeout=20"
        )
        two.wait_until_paused()
        two.hosts[1].cut()
        (two.folder / GO).touch()
        two.wait_until_all_ended()
        said = two.output_of(two.hosts[0])
        assert (two.run / "summary.json").exists(), two.describe()
        assert f"rank 1 (partition 1 on node1): {LOST[:16]}" in said, said
        assert "changed: ranks: 2, hosts: 2, balance: [3, 3] -> ranks: 1, hosts: 1, balance: [6]" in said, (
            said
        )
        assert_equal_to_one_process(two.run, alone)


def test_a_killed_rank_is_restarted_with_all_others(tmp_path: Path, alone: Path) -> None:
    with cluster(2, tmp_path / "x") as two:
        two.start("engine.max_restarts=1", fault="killed", restarts=1)
        two.wait_until_all_ended()
        said = two.output_of(two.hosts[0])
        assert (two.run / "summary.json").exists(), two.describe()
        assert f"error: rank 1 (partition 1 on node1): {DIED}" in said, said
        # The snapshot of step 2 may not be complete when the rank is killed in step 3.
        assert re.search("resuming from|no usable snapshot; starting again at step 0", said), said
        assert_equal_to_one_process(two.run, alone)
