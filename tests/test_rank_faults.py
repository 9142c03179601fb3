"""What can go wrong with one rank of several: all ranks end soon, and one line names the rank that caused it.

These are real processes and real signals. A launch takes seconds, because every rank imports torch: by default one
row runs for each kind of ending, and the other rows are slow.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import gpipe_cli
from gpipe_cli.runs.reader import run_state
from gpipe_cli.runs.snapshots.contents import decode_tensors
from gpipe_cli.runs.snapshots.manifest import MODEL, read_snapshot
from gpipe_cli.tensor_files.tensor_file import encode
from tests.support.command_line import Gpipe
from tests.support.fault_injection import ALLOW, ROWS, TEMPLATE, TRAIN
from tests.support.faulty_ranks import FAULT, SOCKETS
from tests.support.run_files import rows as metrics_rows
from tests.support.sandbox import Sandbox, run_in_sandbox
from tests.support.without_hydra import train_without_hydra

LAST = Path("snapshots", "step-00000008")
LAUNCH = ("train", ALLOW, "run_dir=run")
STOPPED = "rank 1 (partition 1): stopped (SIGSTOP, or a debugger); no answer within step_timeout=6 seconds"
SECONDS = 240
"""Until a launch counts as hanging: a busy machine may take that long to import torch three times."""
pytestmark = pytest.mark.timeout(4 * SECONDS)
STATES = {75: "stopped", 130: "stopped", -signal.SIGKILL: "crashed"}
"""Of the run, by the exit code of its launcher; a run with any other code has failed."""
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


@dataclass(frozen=True)
class Row:
    fault: str
    """Or several faults, one for each attempt."""
    code: int
    messages: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    begins_on_threads: bool = False
    resumes: bool = True
    """Whether one process resumes it, to the bits of a run without a fault."""
    slow: bool = False


TABLE = [
    Row(
        "killed, stopped, launcher terminated",
        75,
        (
            "rank 1 (partition 1) was killed by SIGKILL, perhaps because memory ran out; restarting all ranks",
            f"{STOPPED}; restarting all ranks, restarts left: 0",
            "stopped by SIGTERM; saved in run/snapshots/step-0000000",
        ),
        ("engine.max_restarts=2", "step_timeout=6"),
        slow=True,
    ),
    Row(
        "raises",
        7,
        ("error: rank 1 (partition 1): ValueError: broken (in partition 1, layer ",),
        ("engine.max_restarts=1",),
    ),
    Row(
        "terminated, launcher killed",
        -signal.SIGKILL,
        (),
        ("resume=auto", "engine=processes"),
        begins_on_threads=True,
    ),
    Row("killed", 7, ("error: rank 1 (partition 1) was killed by SIGKILL",)),
    Row("stopped", 7, (f"error: {STOPPED}",), ("step_timeout=6",), slow=True),
    Row("raises in backward", 7, ("rank 1 (partition 1): ValueError: broken backward",), slow=True),
    Row("raises while saving", 7, ("rank 1 (partition 1): ValueError: broken while saving",), slow=True),
    Row(
        "full disk",
        6,
        (
            "rank 1 (partition 1): run/snapshots/step-00000002: the snapshot cannot be written: [Errno 28] No space",
        ),
        resumes=False,
        slow=True,
    ),
    Row(
        "launcher interrupted twice", 130, ("stopped by Ctrl-C at once; resume with: gpipe train",), slow=True
    ),
]


def torchrun(folder: Path, *options: str, fault: str = "") -> subprocess.Popen[str]:
    arguments = [
        word.replace("tests.support.faulty.model", "tests.support.faulty_ranks.model") for word in TRAIN
    ]
    command = ["-m", "torch.distributed.run", *options, "-m", "gpipe_cli", *arguments, "engine=processes"]
    return subprocess.Popen(
        # An address, because the name of this machine may resolve to anything.
        [sys.executable, *command[:2], "--local-addr=127.0.0.1", *command[2:], "run_dir=run", "--json"],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(gpipe_cli.__file__).parents[1]),
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(folder),  # torchrun leaves its own folder there
            FAULT: fault,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def outputs_of(*started: subprocess.Popen[str]) -> list[tuple[str, str]]:
    """Stdout and stderr of each process. A launch that hangs is killed with its ranks."""
    outputs = []
    try:
        for process in started:
            try:
                outputs.append(process.communicate(timeout=SECONDS))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
                outputs.append((out, f"{err}\nkilled after {SECONDS} seconds"))
    finally:
        for process in started:
            process.kill()
            process.wait()
    return outputs


def describe(folder: Path, started: subprocess.Popen[str], out: str, err: str) -> str:
    """Everything known about a launch, for the message of a failed assertion."""
    logs = [f"{path.relative_to(folder)}:\n{path.read_text()}" for path in sorted(folder.rglob("*.log"))]
    return "\n".join([f"exit code {started.returncode}", "stdout:", out, "stderr:", err, *logs])


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make a run without a fault, whose ranks torchrun starts."""
    folder = tmp_path_factory.mktemp("template")
    started = torchrun(folder, "--standalone", "--nproc-per-node=2")
    ((out, err),) = outputs_of(started)
    description = describe(folder, started, out, err)
    assert started.returncode == 0 and out, description
    assert json.loads(out)["steps"] == 8, description
    TEMPLATE[:] = [folder / "run"]


def test_without_a_fault_the_others_log_and_rank_0_writes_the_rest() -> None:
    (run,) = TEMPLATE
    assert {"config.yaml", "metrics.jsonl", "summary.json", "train.log"} <= {
        path.name for path in run.iterdir()
    }
    assert [path.name for path in (run / "logs").iterdir()] == ["rank-1.log"]
    assert "step 8 | train loss" in (run / "logs" / "rank-1.log").read_text()
    rows = metrics_rows(run)
    assert [(row["step"], row["split"]) for row in rows] == ROWS


def weights(run: Path) -> bytes:
    """The last weights as one file, however many ranks wrote them."""
    return b"".join(encode(decode_tensors(read_snapshot(run / LAST), MODEL)))


def with_fault(fault: str) -> Callable[[], None]:
    return lambda: os.environ.update({FAULT: fault})


def check(row: Row, sandbox: Sandbox) -> None:
    if row.begins_on_threads:
        assert sandbox.launch(*LAUNCH, "engine=threads", inject=with_fault(row.fault)) == 75, sandbox.stderr
    code = sandbox.launch(*LAUNCH, *row.arguments, inject=with_fault(row.fault))
    assert code == row.code, sandbox.stderr
    assert all(line in sandbox.stderr for line in row.messages), sandbox.stderr
    assert "Traceback" not in sandbox.stderr and sandbox.stderr.count("gpipe: ") == (code > 0), sandbox.stderr
    assert sandbox.all_ended(), "processes are still running"
    state = run_state(sandbox.run)
    assert state is not None and state.name == STATES.get(code, "failed"), state
    assert state.reason in sandbox.stderr, sandbox.stderr
    if SOCKETS.name in {path.name for path in sandbox.folder.iterdir()}:
        listening = json.loads((sandbox.folder / SOCKETS).read_text())
        assert listening and all(address.partition(":")[0] in LOOPBACK for address in listening), listening
    if row.resumes:
        assert sandbox.launch(*LAUNCH, "resume=auto", "engine=single") == 0, sandbox.stderr
    if row.resumes or code == 0:
        assert sandbox.rows() == ROWS
        assert weights(sandbox.run) == weights(TEMPLATE[0])


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="ranks are watched as Linux lets us")
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.fault, marks=[pytest.mark.slow] if row.slow else []) for row in TABLE],
)
def test_a_fault_of_one_process_ends_as_the_table_says(tmp_path: Path, row: Row) -> None:
    run_in_sandbox(tmp_path, SECONDS, train_without_hydra, lambda sandbox: check(row, sandbox))


@pytest.mark.slow
def test_two_nodes_of_one_rank_each_come_to_the_same(tmp_path: Path) -> None:
    """As on two machines: each torchrun knows the other only through their rendezvous."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
    started = [torchrun(tmp_path, *nodes, "--rdzv-id=x") for _ in range(2)]
    outputs = outputs_of(*started)
    assert [process.returncode for process in started] == [0, 0], outputs
    assert sorted(bool(out) for out, _ in outputs) == [False, True], "only rank 0 prints"
    assert weights(tmp_path / "run") == weights(TEMPLATE[0])


@pytest.mark.slow
def test_torchrun_names_the_rank_that_raised_and_its_reason(tmp_path: Path) -> None:
    started = torchrun(tmp_path, "--standalone", "--nproc-per-node=2", fault="raises")
    ((out, err),) = outputs_of(started)
    root = err.partition("Root Cause")[2]
    assert started.returncode == 1 and not out, err
    assert "rank      : 1 (local_rank: 1)" in root and "ValueError: broken (in partition 1, layer " in root, (
        err
    )


@pytest.mark.slow
def test_an_evaluation_in_ranks_finds_what_one_process_does(
    gpipe: Gpipe,
) -> None:
    arguments = ("eval", f"run={TEMPLATE[0]}", ALLOW, "--json")
    in_ranks, alone = (gpipe(*arguments, engine).json for engine in ("engine=processes", "engine=single"))
    assert {**in_ranks, **{key: alone[key] for key in ("samples_per_second", "seconds", "command")}} == alone


@pytest.mark.slow
def test_the_time_limit_counts_from_the_start_of_the_launcher(tmp_path: Path) -> None:
    def check(sandbox: Sandbox) -> None:
        assert sandbox.launch(*LAUNCH, "time_limit=1s") == 75, sandbox.stderr
        assert "stopped by time_limit=1s" in sandbox.stderr, sandbox.stderr

    run_in_sandbox(tmp_path, SECONDS, train_without_hydra, check)
