"""gpipe train resume=...: on the command line, in a run directory, with signals."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpipe_cli import cli
from gpipe_cli.runs.directory import lock_run_directory
from gpipe_cli.training.metrics import MetricsFile
from tests.support.command_line import Gpipe
from tests.support.run_files import rows as metrics_rows

ALLOW = "allow=[tiny_for_tests]"
WORDS = ("threads=1", "snapshot.every=1", "snapshot.keep=3")


def facts(run: Path) -> dict[str, Any]:
    """What must not depend on how often a run was stopped."""
    timed = ("seconds", "samples_per_second")
    rows = metrics_rows(run)
    newest = max((run / "snapshots").glob("step-*"))
    return {
        "rows": [{key: value for key, value in row.items() if key not in timed} for row in rows],
        "weights": (newest / "model.safetensors").read_bytes(),
        "optimizer": (newest / "optimizer.safetensors").read_bytes(),
    }


def content(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.fixture
def at_row(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Something happens as soon as that many rows have been written to metrics.jsonl."""

    def install(count: int, happens: Callable[[], None]) -> None:
        rows = 0
        write = MetricsFile.write

        def counted(self: MetricsFile, row: Any) -> None:
            nonlocal rows
            write(self, row)
            rows += 1
            if rows == count:
                happens()

        monkeypatch.setattr(MetricsFile, "write", counted)

    return install


REFERENCE: dict[str, Any] = {}


@pytest.fixture
def unbroken(tiny: Gpipe, tmp_path: Path) -> dict[str, Any]:
    """The same for all tests, so it is trained once."""
    if not REFERENCE:
        assert tiny("train", *WORDS, "run_dir=unbroken").code == 0
        REFERENCE.update(facts(tmp_path / "unbroken"))
    return REFERENCE


def test_a_killed_run_resumes_with_the_same_command_and_ends_in_the_same_bits(
    tiny: Gpipe, tmp_path: Path, unbroken: dict[str, Any], at_row: Any
) -> None:
    words = ("train", *WORDS, "run_dir=run", "resume=auto", "data.workers=2")
    child = os.fork()
    if child == 0:
        at_row(7, lambda: os.kill(os.getpid(), signal.SIGKILL))
        tiny(*words)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "torn')
    answer = tiny(*words)
    assert answer.code == 0 and "resuming from run/snapshots/step-" in answer.err
    assert facts(tmp_path / "run") == unbroken
    assert not (tmp_path / "run" / "run.lock").exists()


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGTERM, 75, "SIGTERM"), pytest.param(signal.SIGINT, 130, "Ctrl-C", marks=pytest.mark.slow)],
)
def test_a_signal_ends_the_run_with_the_command_that_resumes_it(
    tiny: Gpipe,
    gpipe: Gpipe,
    tmp_path: Path,
    unbroken: dict[str, Any],
    at_row: Any,
    number: int,
    code: int,
    message: str,
) -> None:
    at_row(
        4, lambda: signal.raise_signal(number)
    )  # the last step of an epoch: its evaluation is still to come
    answer = tiny("train", *WORDS, "run_dir=run")
    assert answer.code == code
    line = answer.err.splitlines()[-1]
    assert line.startswith(
        f"gpipe: stopped by {message}; saved in run/snapshots/step-00000004; resume with: gpipe train "
    )
    assert answer.out == "" and "Traceback" not in answer.err
    answer = gpipe(*shlex.split(line.partition("resume with: gpipe ")[2]))
    assert answer.code == 0 and facts(tmp_path / "run") == unbroken


def test_a_second_ctrl_c_stops_at_once_and_keeps_the_older_snapshot(
    tiny: Gpipe, tmp_path: Path, at_row: Any
) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    at_row(3, twice)
    answer = tiny("train", *WORDS, "run_dir=run")
    # The save of step 2 may be in flight, and is given up.
    assert answer.code == 130
    assert re.search(r"stopped by Ctrl-C at once; saved in run/snapshots/step-0000000[12]; ", answer.err)
    assert not list(tmp_path.glob("run/snapshots/*.tmp"))


def test_a_time_limit_stops_after_a_snapshot(tiny: Gpipe) -> None:
    answer = tiny("train", *WORDS, "run_dir=run", "time_limit=0.001s")
    assert answer.code == 75
    assert "stopped by time_limit=0.001s; saved in run/snapshots/step-00000001; resume with: " in answer.err


@pytest.mark.slow
def test_a_finished_run_does_not_change_unless_it_is_to_train_longer(
    tiny: Gpipe, gpipe: Gpipe, tmp_path: Path
) -> None:
    first = tiny("train", *WORDS, "run_dir=run", "epochs=1", "--json").json
    before = content(tmp_path / "run")
    again = gpipe("train", "resume=run", ALLOW, "--json")
    assert (again.code, again.json) == (0, first) and content(tmp_path / "run") == before
    assert "the run has finished" in again.err
    longer = gpipe("train", "resume=run", ALLOW, "epochs=2", "partitions=3", "--json")
    assert longer.json["steps"] == 8 and "changed: epochs: 1 -> 2" in longer.err
    assert [row["step"] for row in facts(tmp_path / "run")["rows"] if row["split"] == "train"] == list(
        range(1, 9)
    )
    assert (
        gpipe("train", "resume=run", ALLOW, "--json").json == longer.json
    )  # the run remembers how far it goes


REFUSED = {
    "optimizer=sgd": "optimizer._target_=torch.optim.SGD: the run was started with torch.optim.AdamW",
    "model.width=3": "model.width=3: the run was started with null",
    "steps=1": "steps=1: the run has reached step 6",
}
REFUSED_TOO = {
    "seed=3": "seed=3: the run was started with 0",
    "batch_size=4": "batch_size=4: the run was started with 20",
    "data.length=65": "data.length=65: the run was started with 64",
    "data=digits": "data._target_=gpipe_cli.data.images.build_digits",
    "chunk=3": "unknown key 'chunk'",
}


@pytest.mark.parametrize(
    "refused", [REFUSED, pytest.param(REFUSED_TOO, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_resuming_refuses_changes_to_the_model_or_its_samples(
    gpipe: Gpipe, tiny_run: Path, refused: dict[str, str]
) -> None:
    before = content(tiny_run)
    for word, says in refused.items():
        answer = gpipe("train", "resume=run", ALLOW, word)
        assert (answer.code, says in answer.err, answer.err.count("\n")) == (2, True, 1), answer.err
    assert content(tiny_run) == before


def outcome(run: Path) -> tuple[int, str]:
    content = json.loads((run / "outcome.json").read_text())
    return content["exit_code"], content["reason"]


def test_an_attempt_that_fails_before_it_opens_the_run_records_its_own_end(
    tiny: Gpipe, gpipe: Gpipe, tmp_path: Path, at_row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the last attempt was left, so a script read 75 and started an attempt that failed in the same way."""
    at_row(2, lambda: signal.raise_signal(signal.SIGTERM))
    assert tiny("train", *WORDS, "run_dir=run").code == 75
    run, name = tmp_path / "run", "run/snapshots/step-00000002"
    assert outcome(run)[0] == 75
    (run / "snapshots" / "step-00000001" / "manifest.json").write_bytes(b"")
    (tmp_path / "keys.yaml").write_text("run_dir: run\nresume: auto\nchunk: 2\n")
    monkeypatch.setenv("RUN", "run")
    attempts = [
        (("resume=run", "chunk=3"), 2, "unknown key 'chunk'"),
        (("resume=run", "batch_size=4"), 2, "batch_size=4: the run was started with 20"),
        (("run_dir=run", "resume=auto", "chunks=0"), 2, "chunks=0: must be at least 1"),
        (("resume='run'", "--dryrun"), 2, "unknown flag --dryrun"),
        (("resume=${oc.env:RUN}", "chunk=3"), 2, "unknown key 'chunk'"),
        (("config=keys.yaml",), 2, "unknown key 'chunk'"),
        (("resume=run", "config=missing.yaml"), 2, "config=missing.yaml: no such file"),
        ((f"resume={name}", "data.root=gone"), 2, "data.root"),
        (("resume=run/snapshots/step-00000001",), 4, "manifest.json"),
    ]
    for words, code, reason in attempts:
        answer = gpipe("train", *words, ALLOW)
        assert (answer.code, outcome(run)[0]) == (code, code), (words, answer.err)
        assert reason in outcome(run)[1]
    for words in (("resume=run", "--dry-run"), ("resume=run", "--cfg", "job"), ("run_dir=run",)):
        gpipe("train", *words, ALLOW)
        assert outcome(run)[0] == 4, "no attempt to resume it"


def test_an_attempt_that_is_killed_before_it_opens_the_run_leaves_no_older_end(
    tiny: Gpipe, gpipe: Gpipe, tmp_path: Path, at_row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_row(2, lambda: signal.raise_signal(signal.SIGTERM))
    assert tiny("train", *WORDS, "run_dir=run").code == 75
    run = tmp_path / "run"
    child = os.fork()
    if child == 0:  # dies in the composition of its configuration
        monkeypatch.setattr(cli, "_configured", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(gpipe("train", "resume=run", ALLOW).code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (run / "outcome.json").exists()
    with lock_run_directory(run):
        (run / "outcome.json").write_text("that of the process that has the lock")
        child = os.fork()
        if child == 0:
            os._exit(gpipe("train", "resume=run", ALLOW).code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert (run / "outcome.json").read_text() == "that of the process that has the lock"


def test_a_damaged_snapshot_is_skipped_unless_it_was_named(
    tiny: Gpipe, gpipe: Gpipe, tmp_path: Path, unbroken: dict[str, Any], at_row: Any
) -> None:
    at_row(8, lambda: signal.raise_signal(signal.SIGTERM))
    assert tiny("train", *WORDS, "run_dir=run").code == 75
    newest = tmp_path / "run" / "snapshots" / "step-00000007"
    (newest / "optimizer.safetensors").write_bytes(b"nonsense")
    answer = gpipe("train", f"resume={newest}", ALLOW)
    assert answer.code == 4 and "step-00000007/optimizer.safetensors: damaged" in answer.err
    answer = gpipe("train", "resume=run", ALLOW)
    assert answer.code == 0 and "optimizer.safetensors: damaged" in answer.err
    assert "resuming from run/snapshots/step-00000006" in answer.err
    assert facts(tmp_path / "run") == unbroken
    assert (newest.parent / "step-00000007.quarantined").is_dir(), "evidence is kept"


@pytest.mark.slow
def test_a_run_can_go_back_to_an_earlier_snapshot(
    tiny: Gpipe, gpipe: Gpipe, tmp_path: Path, unbroken: dict[str, Any]
) -> None:
    tiny("train", *WORDS, "run_dir=run")
    early = tmp_path / "run" / "snapshots" / "step-00000006"
    assert gpipe("train", f"resume={early}", ALLOW, "partitions=1").code == 0
    assert facts(tmp_path / "run") == unbroken
    assert {path.name for path in early.parent.glob("*.quarantined")} == {
        "step-00000007.quarantined",
        "step-00000008.quarantined",
    }


@pytest.mark.slow
def test_a_run_without_a_snapshot_starts_again_in_the_same_directory(
    tiny: Gpipe, tmp_path: Path, at_row: Any
) -> None:
    words = ("train", "threads=1", "run_dir=run", "resume=auto", "snapshot.every=100")
    assert tiny(*words, "optimizer=sgd", "optimizer.lr=1e30").code == 5
    answer = tiny(*words, "optimizer=sgd", "optimizer.lr=0.1", "steps=2")
    assert answer.code == 0 and "starting again at step 0" in answer.err
    assert [row["step"] for row in facts(tmp_path / "run")["rows"]] == [1, 2, 2]


@pytest.mark.parametrize("has_snapshot", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_engine_resumes_a_run_whose_keys_it_does_not_use(
    gpipe: Gpipe, tiny_run: Path, has_snapshot: bool
) -> None:
    """engine=single refused the saved step_timeout, but only of a run that had ended before its first snapshot."""
    saved = tiny_run / "config.yaml"
    saved.write_text(saved.read_text().replace("step_timeout: null", "step_timeout: 60"))
    if not has_snapshot:
        shutil.rmtree(tiny_run / "snapshots")
    answer = gpipe("train", "run_dir=run", "resume=auto", ALLOW, "engine=single", "steps=7")
    assert answer.code == 0, answer.err
    assert ("starting again at step 0" in answer.err) == (not has_snapshot)


def test_another_number_of_replicas_is_told_to_change_bits(gpipe: Gpipe, tiny_run: Path) -> None:
    """The line named the change without a word about results."""
    saved = tiny_run / "config.yaml"  # as three replicas would have left it
    text = saved.read_text().replace("data_parallel: 1", "data_parallel: 3")
    saved.write_text(text.replace("gpipe_cli.engines.threads", "gpipe_cli.engines.processes"))
    answer = gpipe("train", "resume=run", ALLOW, "engine=threads", "steps=7")
    assert answer.code == 0, answer.err
    line = "replicas: 3 -> 1: gradients are summed in another order, so results may differ in the last bits"
    assert line in answer.err.splitlines()
    assert "replicas:" not in gpipe("train", "resume=run", ALLOW, "partitions=1", "steps=8").err


def test_a_run_without_evaluations_finishes_resumes_and_may_be_evaluated_later(
    tiny: Gpipe, gpipe: Gpipe, tmp_path: Path
) -> None:
    answer = tiny("train", "eval=none", "steps=6", "run_dir=none", "--json")
    assert answer.code == 0 and answer.json["steps"] == 6 and "loss" not in answer.json
    rows = list(map(json.loads, (tmp_path / "none/metrics.jsonl").read_text().splitlines()))
    assert {row["split"] for row in rows} == {"train"} and rows[-1]["step"] == 6
    assert "the run has finished; gpipe changed nothing" in gpipe("train", "resume=none", ALLOW).err
    assert "no best snapshot" in gpipe("eval", "run=none", "which=best", ALLOW).err
    assert gpipe("eval", "run=none", ALLOW).out.startswith("loss ")
    assert tiny("train", "steps=6", "run_dir=every").code == 0
    with_loss = gpipe("train", "resume=none", "eval=epoch", ALLOW, "--json")
    assert with_loss.json["loss"] == json.loads((tmp_path / "every/summary.json").read_text())["loss"]


def test_a_part_of_the_evaluation_has_the_same_result_on_resume_and_with_every_engine_and_split(
    tiny: Gpipe, gpipe: Gpipe, tmp_path: Path
) -> None:
    words = ("eval.batches=1", "eval.every=2", "batch_size=12", "steps=4", "threads=1")
    saves = ("snapshot.every=2", "snapshot.keep=9", "run_dir=whole")
    whole = tiny("train", *words, *saves, "--json").json
    for given in (("partitions=1",), ("engine=single",)):
        assert tiny("train", *words, *given, "--json").json["loss"] == whole["loss"]
    all_batches = tiny("train", *words[1:], "--json").json
    assert all_batches["loss"] != whole["loss"]
    resumed = gpipe("train", "resume=whole/snapshots/step-00000002", ALLOW, "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["loss"] == whole["loss"]


def test_a_run_of_an_earlier_version_keeps_its_evaluations_and_the_samples_that_it_held_out(
    tiny: Gpipe, gpipe: Gpipe, tiny_run: Path
) -> None:
    """They are chosen by seed alone, and trained on if they change."""
    text = (tiny_run / "config.yaml").read_text()
    saved = yaml.safe_load(text)
    assert saved.pop("eval") == {"every": "epoch", "batches": None}
    assert saved["data"].pop("stratify") is True
    saved["eval_every"] = 7
    (tiny_run / "config.yaml").write_text(yaml.safe_dump(saved))
    answer = gpipe("train", "resume=run", "steps=8", ALLOW)
    assert answer.code == 0 and "eval.every" not in answer.err and "stratify" not in answer.err
    now = yaml.safe_load((tiny_run / "config.yaml").read_text())
    assert now["eval"] == {"every": "epoch", "batches": None} and now["data"]["stratify"] is False
    rows = map(json.loads, (tiny_run / "metrics.jsonl").read_text().splitlines())
    assert 7 in [row["step"] for row in rows if row["split"] == "eval"]
    told = gpipe("train", "model=mlp", "eval_every=5", "--dry-run").err
    assert told.count("eval_every works for one more release; eval.every=<steps>") == 1


def test_only_one_process_at_a_time_writes_to_a_run(gpipe: Gpipe, tiny_run: Path) -> None:
    held, release = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with lock_run_directory(tiny_run):
            os.write(held[1], b"x")
            os.read(release[0], 1)
        os._exit(0)
    os.read(held[0], 1)
    answer = gpipe("train", "resume=run", ALLOW, "steps=8")
    assert answer.code == 2
    assert f"run_dir=run: in use by process {child} on {os.uname().nodename}, since 20" in answer.err
    os.kill(child, signal.SIGKILL)  # a dead owner needs no further permission
    os.waitpid(child, 0)
    with lock_run_directory(tiny_run):
        pass
