from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gpipe_cli.cli import main
from tests.support.command_line import Gpipe
from tests.support.run_files import snapshot_tensors
from tests.support.user_models import TINY_TRAINING

JOB_START = str(int(time.time()))
"""When Slurm started the job, in seconds since 1970."""
SLURM = ("slurm", "nodes=2", "gpus_per_node=4", "time_limit=4h", "run_dir=run")
TORCHRUN = ("torchrun", "hosts=[node0,node1]", "gpus_per_node=4", "run_dir=run")
HOSTILE = (
    "model.weights='$(touch evil)'",
    "data.root='a b; touch evil #'",
    "loss.x=`touch evil`\ntouch evil",
    'transform.y=it\'s "this"',
)
WORDS = [f"+{word}" for word in HOSTILE]

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >> srun.txt; shift; done
pids=()
for node in $NODES; do SLURMD_NODENAME=$node "$@" & pids+=($!); done
worst=0
for pid in "${pids[@]}"; do wait "$pid" || worst=$?; done
exit $worst
"""
SCONTROL = """#!/bin/bash
if [ "$1" = requeue ]; then echo "$2" >> requeued.txt; else printf '%s\\n' $NODES; fi
"""
TORCH = """#!/bin/bash
printf '%s\\n' "$@" > "started-$SLURMD_NODENAME.txt"
printf '%s\\n' "$GPIPE_JOB_START" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > environment.txt
[ -z "$CODE" ] || printf '%s' "$CODE" > "$GPIPE_EXIT_CODE_FILE"
[ -z "$WAIT" ] || { trap 'echo TERM >> signals.txt; exit 1' TERM; touch ready; while :; do sleep 0.05; done; }
exit "$STATUS"
"""
"""Takes the place of Python, which would run torchrun."""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH with what a Slurm job calls, and the environment of a job on two nodes."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": TORCH}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_START_TIME": JOB_START}
    job |= {"NODES": "n1 n2", "code": "an unrelated variable", "CODE": "", "WAIT": ""}
    for name, value in {**job, "PATH": f"{folder}:{os.environ['PATH']}", "STATUS": "0"}.items():
        monkeypatch.setenv(name, value)
    return folder


def execute(script: str) -> subprocess.CompletedProcess[str]:
    Path("job.sh").write_text(script)
    return subprocess.run(["bash", "job.sh"], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("words", [SLURM, (*SLURM, "requeue=2", "cpus_per_node=32", "port=4000"), TORCHRUN])
def test_shellcheck_finds_nothing(gpipe: Gpipe, words: tuple[str, ...]) -> None:
    script = gpipe("launch-script", *words, *WORDS).out
    check = subprocess.run(
        ["shellcheck", "-"], input=script, capture_output=True, text=True, check=False, encoding="utf-8"
    )
    assert (check.stdout, check.returncode) == ("", 0)


def test_a_slurm_job_starts_torchrun_on_every_node_with_the_words_as_they_were_given(
    gpipe: Gpipe, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    script = gpipe("launch-script", *SLURM, *WORDS).out
    assert "#SBATCH --nodes=2 --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n#SBATCH --exclusive\n" in script
    assert "#SBATCH --time=04:00:00 --signal=TERM@300\n#SBATCH --no-requeue" in script
    answer = execute(script)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert Path("srun.txt").read_text().split() == ["--kill-on-bad-exit=0", "--wait=60", "--cpu-bind=none"]
    assert Path("environment.txt").read_text().split() == [JOB_START, "290"]
    for node in ("n1", "n2"):
        started = Path(f"started-{node}.txt").read_text()
        options, _, words = started.partition("\n-m\ngpipe_cli\n")
        assert " ".join(options.split()) == (
            "-m torch.distributed.run --nnodes 2 --nproc-per-node 4 --rdzv-id 7 --rdzv-backend gpipe "
            "--rdzv-endpoint n1:20007 --rdzv-conf hosts=n1/n2"
        )
        own = ["train", "engine=processes", "run_dir=run", *WORDS, "resume=auto", "time_limit=13800s"]
        assert words == "\n".join(own) + "\n"
    assert not Path("evil").exists()


def test_a_script_for_torchrun_is_the_same_on_every_host(
    gpipe: Gpipe, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("SLURMD_NODENAME", "here")
    answer = execute(gpipe("launch-script", *TORCHRUN, *WORDS, "time_limit=1h").out)
    assert (answer.returncode, answer.stderr) == (0, "")
    options, _, words = Path("started-here.txt").read_text().partition("\n-m\ngpipe_cli\n")
    assert " ".join(options.split()[2:]) == (
        "--nnodes 2 --nproc-per-node 4 --rdzv-id run --rdzv-backend gpipe --rdzv-endpoint node0:29500 "
        "--rdzv-conf hosts=node0/node1"
    )
    own_words = ["train", "engine=processes", "run_dir=run", *WORDS, "time_limit=1h", "resume=auto"]
    assert words == "\n".join(own_words) + "\n"
    assert not Path("evil").exists()


@pytest.mark.parametrize(
    ("status", "own", "restarts", "files", "code", "requeued"),
    [
        pytest.param("0", "", "", ("config.yaml", "summary.json"), 0, False, id="finished"),
        pytest.param("1", "75", "", ("config.yaml",), 75, True, id="stopped"),
        pytest.param("1", "75", "", (), 75, True, id="stopped before it opened the run"),
        pytest.param("1", "7", "1", ("config.yaml",), 7, True, id="a node was lost"),
        pytest.param("7", "7", "1", (), 7, True, id="a node did not join"),
        pytest.param("1", "7", "2", ("config.yaml",), 7, False, id="often enough"),
        pytest.param("1", "5", "", ("config.yaml",), 5, False, id="an error that would repeat"),
        pytest.param("1", "3", "", (), 3, False, id="an error before there was a run directory"),
        pytest.param("137", "", "", ("config.yaml",), 137, True, id="killed"),
        pytest.param("1", "", "", (), 1, False, id="never began"),
        pytest.param("1", "", "", ("config.yaml", "summary.json"), 1, False, id="failed after its end"),
    ],
)
def test_a_slurm_job_exits_as_the_run_and_goes_back_into_the_queue_until_it_has_finished(
    gpipe: Gpipe,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    own: str,
    restarts: str,
    files: tuple[str, ...],
    code: int,
    requeued: bool,
) -> None:
    """The script read the outcome of the attempt before, so an error that repeats was repeated."""
    monkeypatch.setenv("STATUS", status)
    monkeypatch.setenv("CODE", own)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    if restarts:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    for name in files:
        Path("new", "run").mkdir(parents=True, exist_ok=True)
        Path("new", "run", name).touch()
    Path("new").mkdir(exist_ok=True)
    Path("new", "run.exit-code-7").write_text("75")  # of an attempt that was killed
    words = ("slurm", "nodes=2", "ranks_per_node=1", "time_limit=10m", "run_dir=new/run", "cpus_per_node=2")
    assert execute(gpipe("launch-script", *words, "requeue=2").out).returncode == code
    assert Path("requeued.txt").exists() == requeued
    assert Path("srun.txt").read_text().split() == ["--kill-on-bad-exit=0", "--wait=60", "--cpus-per-task=2"]
    Path("requeued.txt").unlink(missing_ok=True)
    assert execute(gpipe("launch-script", *words).out).returncode == code
    assert not Path("requeued.txt").exists() and not Path("new", "run.exit-code-7").exists()


def test_a_script_for_torchrun_passes_signals_on_and_exits_as_the_run(
    gpipe: Gpipe, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    script = gpipe("launch-script", *TORCHRUN).out
    for status, own, code in (("0", "", 0), ("1", "3", 3), ("7", "", 7)):
        monkeypatch.setenv("STATUS", status)
        monkeypatch.setenv("CODE", own)
        assert execute(script).returncode == code
    monkeypatch.setenv("WAIT", "yes")
    monkeypatch.setenv("CODE", "75")
    with subprocess.Popen(["bash", "job.sh"]) as running:
        while not Path("ready").exists():
            signal.sigtimedwait([], 0.05)
        running.terminate()
        assert running.wait(60) == 75
    assert Path("signals.txt").read_text() == "TERM\n"


@pytest.mark.slow
def test_a_slurm_job_on_two_nodes_trains_to_the_bits_of_one_process(
    tiny: Gpipe, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODES", "127.0.0.1 127.0.0.2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = f"port={server.getsockname()[1]}"
    words = ["slurm", "nodes=2", "ranks_per_node=1", "time_limit=1h", "requeue=1", port, *TINY_TRAINING]
    script = tiny("launch-script", *words, "run_dir=run", "steps=2", "threads=1").out
    answer = execute(script)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(Path("run", "summary.json").read_text())["steps"] == 2
    assert not Path("requeued.txt").exists()
    assert tiny("train", "run_dir=same", "steps=2", "threads=1").code == 0
    for kind in ("model", "optimizer"):
        same, ours = (
            snapshot_tensors(Path(run, "snapshots", "step-00000002"), kind) for run in ("same", "run")
        )
        assert same.keys() == ours.keys()
        assert all(torch.equal(tensor, ours[name]) for name, tensor in same.items())


@pytest.mark.slow
def test_a_slurm_job_whose_loss_is_not_finite_exits_as_the_run_did(
    tiny: Gpipe, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODES", "127.0.0.1")
    words = ["slurm", "nodes=1", "ranks_per_node=2", "time_limit=1h", "requeue=1", *TINY_TRAINING]
    answer = execute(tiny("launch-script", *words, "run_dir=run", "optimizer.lr=1e30").out)
    assert answer.returncode == 5 and not Path("requeued.txt").exists()
    assert json.loads(Path("run", "outcome.json").read_text())["exit_code"] == 5


def test_json_has_the_script_and_the_number_of_ranks(gpipe: Gpipe) -> None:
    facts = gpipe("launch-script", *SLURM, "--json").json
    assert {**facts, "script": ""} == {
        "kind": "slurm",
        "nodes": 2,
        "ranks": 8,
        "run_dir": "run",
        "script": "",
    }
    assert facts["script"].startswith("#!/bin/bash\n")


def test_a_file_and_a_folder_of_options_are_passed_on(gpipe: Gpipe, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "engine: processes\nengine.max_restarts: 2\nrun_dir: mine\ntime_limit: 1h\n"
    )
    words = ("slurm", "nodes=1", "ranks_per_node=2", "config=my.yaml", "--config-dir", "conf")
    (tmp_path / "conf").mkdir()
    script = gpipe("launch-script", *words).out
    assert "command=(train\n    config=my.yaml\n    --config-dir\n    conf\n    resume=auto\n" in script
    assert "    time_limit=3240s)\n" in script and f"run={tmp_path}/mine\n" in script
    (tmp_path / "my.yaml").write_text("engine: threads\nrun_dir: mine\n")
    answer = gpipe("launch-script", *words)
    assert answer.code == 2 and "my.yaml: engine: only engine=processes runs on several" in answer.err
    (tmp_path / "my.yaml").write_text("cpus_per_node: 2\nrun_dir: mine\ntime_limit: 1h\n")
    answer = gpipe("launch-script", *words)
    assert answer.code == 2 and "cpus_per_node: give it on the command line; gpipe train reads" in answer.err


def test_nothing_imports_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from gpipe_cli.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", program, "launch-script", *SLURM],
        check=True,
        cwd=tmp_path,
        capture_output=True,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give the kind of script first, slurm or torchrun"),
        (("pbs",), "kind=pbs: choose one of: slurm, torchrun"),
        (("slurm", "torchrun"), "'torchrun' is neither a flag nor key=value"),
        ((*SLURM, "engine=threads"), "engine: only engine=processes runs on several machines"),
        ((*SLURM, "nodez=2"), "unknown key 'nodez'; did you mean 'nodes'?"),
        ((*SLURM, "chunk=2"), "unknown key 'chunk'; did you mean 'chunks'?"),
        ((*SLURM, "optimizer.lrr=2"), "'optimizer.lrr'; did you mean 'optimizer.lr'?"),
        ((*SLURM, "chunks=0"), "chunks=0: must be at least 1"),
        ((*SLURM, "nodes=3"), "nodes: given as 2 and as 3; give it once"),
        (("slurm", "nodes=0", "gpus_per_node=1"), "nodes=0: must be at least 1"),
        (("slurm", "nodes=two", "gpus_per_node=1"), "nodes=two: expected a whole number"),
        (("slurm", "nodes=2"), "give one of gpus_per_node=<number>"),
        ((*SLURM, "ranks_per_node=2"), "give one of gpus_per_node=<number>"),
        (("slurm", "gpus_per_node=1"), "nodes: give nodes=<number>"),
        ((*SLURM, "hosts=[a]"), "hosts: has no effect on slurm, whose keys are nodes"),
        ((*TORCHRUN, "requeue=2"), "requeue: has no effect on torchrun, whose keys are hosts"),
        (("torchrun", "hosts=['a;b']", "gpus_per_node=1"), "hosts=['a;b']: give the names or IPv4 addresses"),
        (("torchrun", "hosts=[a;b]", "gpus_per_node=1"), "hosts=[a;b]: cannot be read"),
        (("torchrun", "hosts=[a,a]", "gpus_per_node=1"), "hosts=['a', 'a']: names a host twice"),
        (("torchrun", "gpus_per_node=1"), "hosts=[]: give the names or IPv4 addresses of all hosts"),
        (SLURM[:-1], "run_dir: give run_dir=<directory>, on a disk that all machines share"),
        (
            ("slurm", "nodes=1", "gpus_per_node=1", "run_dir=run"),
            "time_limit: give the time limit of the Slurm job",
        ),
        (
            (*SLURM[:3], SLURM[4], "time_limit=2m"),
            "time_limit: give the time limit of the Slurm job, at least 5m",
        ),
        ((*SLURM[:-1], "resume=old"), "resume=old: the script itself resumes the run in run_dir"),
        ((*SLURM, "devices=[cpu,cpu]"), "devices=['cpu', 'cpu']: nodes=2 gpus_per_node=4 make 8 ranks"),
        (
            (*SLURM, "partitions=3"),
            "nodes=2 gpus_per_node=4 make 8 ranks: partitions=3: each partition needs",
        ),
        ((*SLURM, "data_parallel=3"), "make 8 ranks: data_parallel=3: 8 devices"),
        ((*SLURM, "balance=manual", "balance.layers=[5,5]"), "balance.layers=[5, 5] makes 2 partitions"),
        ((*SLURM, "port=70000"), "port=70000: must be at most 65535"),
        ((*SLURM[2:], "slurm", "nodes=1000"), "nodes=1000 gpus_per_node=4: more than 1024 ranks"),
        ((*SLURM, "-m"), "unknown flag -m"),
    ],
)
def test_a_mistake_is_reported_instead_of_a_script(
    gpipe: Gpipe, words: tuple[str, ...], message: str
) -> None:
    answer = gpipe("launch-script", *words)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err


def test_the_command_is_completed_with_its_own_keys_and_those_of_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {
        "gpipe launch-script to": ["torchrun"],
        "gpipe launch-script slurm no": ["nodes="],
        "gpipe launch-script slurm nodes=2 model=resnet15": ["model=resnet152"],
        "gpipe launch-script slurm nodes=2 time_l": ["time_limit="],
    }
    for line, words in expected.items():
        monkeypatch.setenv("COMP_LINE", line)
        assert main(["-sc", "query=bash"]) == 0
        assert capsys.readouterr().out.split() == words, line
