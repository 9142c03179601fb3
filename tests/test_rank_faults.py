"""What can go wrong with one of several processes: all of them end, soon, and one line names the one to blame.

Real processes, real signals. A launch takes seconds, since every rank imports torch: one row per kind of end is in the
suite, the others are slow.
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
from typing import Any

import pytest

import gpipe_cli
from tests.fault_injection import ALLOW, ROWS, TEMPLATE, TRAIN
from tests.faulty_ranks import FAULT, SOCKETS
from tests.scene import Scene, play
from tests.without_hydra import composed

LAST = Path("snapshots", "step-00000008", "model.safetensors")
LAUNCH = ("train", ALLOW, "run_dir=run")
STOPPED = "rank 1 (partition 1): stopped (SIGSTOP, or a debugger); no answer within step_timeout=6 seconds"
SECONDS = 240
"""Until a launch is said to hang: a machine that is busy otherwise may take that long to import torch three times."""
pytestmark = pytest.mark.timeout(4 * SECONDS)
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


@dataclass(frozen=True)
class Row:
    fault: str
    """Or several, one for each attempt."""
    code: int
    says: tuple[str, ...]
    words: tuple[str, ...] = ()
    begins_on_threads: bool = False
    resumes: bool = True
    """On one process, to the very bits of a run that nothing happened to."""
    slow: bool = False


TABLE = [
    Row(
        "killed, stopped, launcher terminated",
        75,
        (
            "rank 1 (partition 1) was killed by SIGKILL, perhaps because memory ran out; starting all ranks again",
            f"{STOPPED}; starting all ranks again, restarts left: 0",
            "stopped by SIGTERM; saved in run/snapshots/step-0000000",
        ),
        ("engine.max_restarts=2", "step_timeout=6"),
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
    Row("killed", 7, ("error: rank 1 (partition 1) was killed by SIGKILL",), slow=True),
    Row("stopped", 7, (f"error: {STOPPED}",), ("step_timeout=6",), slow=True),
    Row("raises in backward", 7, ("rank 1 (partition 1): ValueError: broken backward",), slow=True),
    Row("raises while saving", 7, ("rank 1 (partition 1): ValueError: broken while saving",), slow=True),
    Row(
        "full disk",
        6,
        (
            "rank 0 (partition 0): run/snapshots/step-00000002: the snapshot cannot be written: [Errno 28] No space",
        ),
        resumes=False,
        slow=True,
    ),
    Row(
        "launcher interrupted twice", 130, ("stopped by Ctrl-C at once; resume with: gpipe train",), slow=True
    ),
]


def torchrun(folder: Path, *options: str, fault: str = "") -> subprocess.Popen[str]:
    words = [word.replace("tests.faulty.model", "tests.faulty_ranks.model") for word in TRAIN]
    command = ["-m", "torch.distributed.run", *options, "-m", "gpipe_cli", *words, "engine=processes"]
    return subprocess.Popen(
        # By address: what the name of this machine resolves to is not what is tested.
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


def printed_by(*started: subprocess.Popen[str]) -> list[tuple[str, str]]:
    """Results and words of each; none of them is left behind, nor are the ranks of one that hangs."""
    printed = []
    try:
        for one in started:
            try:
                printed.append(one.communicate(timeout=SECONDS))
            except subprocess.TimeoutExpired:
                os.killpg(one.pid, signal.SIGKILL)
                found, said = one.communicate()
                printed.append((found, f"{said}\nkilled after {SECONDS} seconds"))
    finally:
        for one in started:
            one.kill()
            one.wait()
    return printed


def explained(folder: Path, started: subprocess.Popen[str], found: str, said: str) -> str:
    """All that is known of a launch that did not end as it should."""
    logs = [f"{path.relative_to(folder)}:\n{path.read_text()}" for path in sorted(folder.rglob("*.log"))]
    return "\n".join([f"exit code {started.returncode}", "stdout:", found, "stderr:", said, *logs])


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run without a fault, its ranks started by torchrun."""
    folder = tmp_path_factory.mktemp("template")
    started = torchrun(folder, "--standalone", "--nproc-per-node=2")
    ((found, said),) = printed_by(started)
    story = explained(folder, started, found, said)
    assert started.returncode == 0 and found, story
    assert json.loads(found)["steps"] == 8, story
    TEMPLATE[:] = [folder / "run"]


def test_without_a_fault_the_others_log_and_rank_0_writes_the_rest() -> None:
    (run,) = TEMPLATE
    assert {"config.yaml", "metrics.jsonl", "summary.json", "train.log"} <= {
        one.name for one in run.iterdir()
    }
    assert [one.name for one in (run / "logs").iterdir()] == ["rank-1.log"]
    assert "step 8 | loss" in (run / "logs" / "rank-1.log").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["split"]) for row in rows] == ROWS


def with_fault(fault: str) -> Callable[[], None]:
    return lambda: os.environ.update({FAULT: fault})


def check(row: Row, scene: Scene) -> None:
    if row.begins_on_threads:
        assert scene.launch(*LAUNCH, "engine=threads", inject=with_fault(row.fault)) == 75, scene.said
    code = scene.launch(*LAUNCH, *row.words, inject=with_fault(row.fault))
    assert code == row.code, scene.said
    assert all(line in scene.said for line in row.says), scene.said
    assert "Traceback" not in scene.said and scene.said.count("gpipe: ") == (code > 0), scene.said
    assert scene.nobody_left(), "processes are left"
    if SOCKETS.name in {one.name for one in scene.folder.iterdir()}:
        listening = json.loads((scene.folder / SOCKETS).read_text())
        assert listening and all(one.partition(":")[0] in LOOPBACK for one in listening), listening
    if row.resumes:
        assert scene.launch(*LAUNCH, "resume=auto", "engine=single") == 0, scene.said
    if row.resumes or code == 0:
        assert scene.rows() == ROWS
        assert (scene.run / LAST).read_bytes() == (TEMPLATE[0] / LAST).read_bytes()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="ranks are watched as Linux lets us")
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.fault, marks=[pytest.mark.slow] if row.slow else []) for row in TABLE],
)
def test_a_fault_of_one_process_ends_as_the_table_says(tmp_path: Path, row: Row) -> None:
    play(tmp_path, SECONDS, composed, lambda scene: check(row, scene))


@pytest.mark.slow
def test_two_nodes_of_one_rank_each_come_to_the_same(tmp_path: Path) -> None:
    """Two machines but for the network between them: each torchrun knows of the other by their meeting point only."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    nodes = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
    started = [torchrun(tmp_path, *nodes, "--rdzv-id=x") for _ in range(2)]
    found = printed_by(*started)
    assert [one.returncode for one in started] == [0, 0], found
    assert sorted(bool(results) for results, _ in found) == [False, True], "rank 0 alone speaks"
    assert (tmp_path / "run" / LAST).read_bytes() == (TEMPLATE[0] / LAST).read_bytes()


@pytest.mark.slow
def test_torchrun_names_the_rank_that_raised_and_its_reason(tmp_path: Path) -> None:
    started = torchrun(tmp_path, "--standalone", "--nproc-per-node=2", fault="raises")
    ((found, said),) = printed_by(started)
    root = said.partition("Root Cause")[2]
    assert started.returncode == 1 and not found, said
    assert "rank      : 1 (local_rank: 1)" in root and "ValueError: broken (in partition 1, layer " in root, (
        said
    )


@pytest.mark.slow
def test_an_evaluation_in_ranks_finds_what_one_process_does(
    gpipe: Callable[..., Any],
) -> None:
    words = ("eval", f"run={TEMPLATE[0]}", ALLOW, "--json")
    in_ranks, alone = (gpipe(*words, engine).json for engine in ("engine=processes", "engine=single"))
    assert {**in_ranks, **{key: alone[key] for key in ("samples_per_second", "seconds", "command")}} == alone


@pytest.mark.slow
def test_the_time_limit_counts_from_the_start_of_the_launcher(tmp_path: Path) -> None:
    def check(scene: Scene) -> None:
        assert scene.launch(*LAUNCH, "time_limit=1s") == 75, scene.said
        assert "stopped by time_limit=1s" in scene.said, scene.said

    play(tmp_path, SECONDS, composed, check)
