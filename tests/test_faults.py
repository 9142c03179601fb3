"""A table of what can go wrong with a training run: the fault, how the process ends, and whether the run resumes.

Each row is a real process with a real fault. It must end by itself with the right exit code and one line, and leave
no process, no thread and no partial file. A run that can be resumed continues without a gap or a repeated step.
`test_rank_faults` has the faults of runs of several processes.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_cli.cli import main
from gpipe_cli.training.metrics import MetricsFile
from tests.support.fault_checks import (
    all_rows,
    free_the_disk,
    has_snapshots,
    no_run_was_written,
    only_run_files,
    whole_rows,
)
from tests.support.fault_injection import (
    ALLOW,
    MORE_EPOCHS,
    RESUME,
    ROWS,
    SNAPSHOT_BYTES,
    TEMPLATE,
    TRAIN,
    WIDE_MODEL,
    Inject,
    SandboxStep,
    after_pending_save,
    after_rows,
    copy_stopped_run,
    each_has_its_own_directory,
    fail_log_writes,
    fail_snapshot_fsync,
    fill_disk,
    fill_disk_for_a_while,
    flip_a_bit,
    in_layer,
    in_sample,
    interrupt_twice,
    kill_self,
    kill_while_pruning,
    kill_while_saving,
    leave_a_lock_file,
    leave_a_partial_snapshot,
    let_an_hour_pass,
    on_one_core,
    other_run_finishes,
    overflow_gradients,
    raises,
    remount_read_only,
    remove_a_file,
    remove_manifest,
    send_signals,
    signal_again_during_slow_save,
    start_other_run,
    start_two_more,
    stop_the_clock,
    suspend,
    tear_a_line,
    terminate_group,
    truncate,
    with_damaged_snapshot,
    with_disk_of,
)
from tests.support.sandbox import Sandbox, run_in_sandbox
from tests.support.without_hydra import train_without_hydra


def nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Row:
    number: str
    """Identifies the kind of fault; the same number in several rows is the same kind."""
    fault: str
    code: int
    """An exit code, or the negative number of a signal."""
    message: str
    inject: Inject = nothing
    """Called in the process of the run before it starts."""
    arguments: tuple[str, ...] = ()
    before: SandboxStep = nothing
    after: SandboxStep = nothing
    resumes: bool = False
    """Whether resuming it without a fault ends as if nothing had happened."""
    command: tuple[str, ...] = (*TRAIN, "run_dir=run")
    has_stuck_thread: bool = False
    """Whether a thread hangs; it must not keep the process alive."""
    needs_hydra: bool = False
    """Whether its arguments need Hydra."""
    slow: bool = False
    """Whether only `-m slow` runs it, because another row or test proves nearly the same."""
    limit: float = 120.0
    """Seconds until the run counts as hanging. Generous, because timing must not fail a test."""


TABLE = [
    Row("1", "killed while a snapshot is written", -9, "", kill_while_saving(30), resumes=True),
    Row(
        "2",
        "killed between a save and the removal of an old one",
        -9,
        "",
        kill_while_pruning,
        resumes=True,
        slow=True,
    ),
    Row(
        "3",
        "the disk is full when a snapshot is written",
        6,
        "step-00000004: the snapshot cannot be written: [Errno 28] No space left on device; it needs ",
        after_rows(3, after_pending_save(fill_disk)),
        (f"model.width={WIDE_MODEL}",),
        before=with_disk_of(8 * SNAPSHOT_BYTES),
        after=free_the_disk,
        resumes=True,
    ),
    Row(
        "4",
        "the disk is full for a while, under the logs alone",
        0,
        "No space left on device; training continues",
        fill_disk_for_a_while,
        ("snapshot.every=100", f"epochs={MORE_EPOCHS}"),
        before=with_disk_of(8 * SNAPSHOT_BYTES),
        after=all_rows,
    ),
    Row(
        "40",
        "killed in the middle of a step of a run whose model is on the disk",
        -9,
        "",
        in_layer(kill_self),
        ("engine=offload", "engine.to=disk", "engine.slices=2"),
        after=only_run_files,
        resumes=True,
        needs_hydra=True,
        slow=True,
    ),
    Row(
        "40",
        "the disk has no room for the model",
        6,
        "the offloaded model cannot be stored there: No space left on device; ",
        arguments=("engine=offload", "engine.to=disk", "engine.slices=2", f"model.width={WIDE_MODEL}"),
        before=with_disk_of(SNAPSHOT_BYTES // 4),
        after=no_run_was_written,
        needs_hydra=True,
    ),
    Row(
        "4",
        "the disk fails under the logs, for good",
        0,
        "Input/output",
        fail_log_writes,
        after=whole_rows,
        slow=True,
    ),
    Row(
        "5",
        "fsync fails in a snapshot",
        6,
        "[Errno 5] Input/output error; it needs ",
        fail_snapshot_fsync,
        after=has_snapshots(2),
        resumes=True,
        slow=True,
    ),
    Row(
        "6",
        "room for one snapshot, three are planned",
        6,
        "3 snapshots of about ",
        arguments=(f"model.width={WIDE_MODEL}",),
        before=with_disk_of(2 * SNAPSHOT_BYTES),
        after=has_snapshots(2),
        slow=True,
    ),
    Row(
        "6",
        "no room for a single snapshot",
        6,
        "run: no room for a snapshot: it needs about ",
        arguments=(f"model.width={WIDE_MODEL}",),
        before=with_disk_of(SNAPSHOT_BYTES // 2),
        after=no_run_was_written,
        slow=True,
    ),
    Row("7", "the run directory is read-only", 6, "is not writable", before=remount_read_only),
    Row(
        "8",
        "the newest snapshot is cut",
        0,
        "has ",
        before=with_damaged_snapshot(truncate),
        command=RESUME,
        slow=True,
    ),
    Row(
        "9",
        "a bit of it has flipped",
        0,
        "its sha256 is ",
        before=with_damaged_snapshot(flip_a_bit),
        command=RESUME,
    ),
    Row(
        "10",
        "it has no manifest",
        0,
        "an incomplete one",
        before=with_damaged_snapshot(remove_manifest),
        command=RESUME,
    ),
    Row(
        "10",
        "it lacks a file",
        0,
        "optimizer.safetensors: damaged or missing",
        before=with_damaged_snapshot(remove_a_file),
        command=RESUME,
        slow=True,
    ),
    Row(
        "10",
        "a damaged one is asked for by name",
        4,
        "step-00000005/optimizer.safetensors: damaged",
        before=with_damaged_snapshot(remove_a_file),
        command=("train", "resume=run/snapshots/step-00000005", ALLOW),
        slow=True,
    ),
    Row(
        "11",
        "half of a snapshot was left",
        0,
        "",
        before=with_damaged_snapshot(leave_a_partial_snapshot),
        command=RESUME,
    ),
    Row(
        "12",
        "not a number in a layer",
        5,
        "step 3, epoch 1",
        in_layer(lambda: float("nan")),
        ("balance=uniform",),
        after=has_snapshots(2),
        resumes=True,
        needs_hydra=True,
    ),
    Row(
        "13",
        "fp16 gradients that overflow at every scale",
        5,
        "overflowed in 20 steps in a row",
        overflow_gradients,
        ("precision=fp16", "epochs=20", "snapshot.every=1000"),
        slow=True,
    ),
    Row(
        "14",
        "memory that cannot be had",
        6,
        "bytes; try more chunks, checkpoint=always",
        in_layer(lambda: torch.empty(2**46)),
        resumes=True,
        slow=True,
    ),
    Row(
        "16",
        "a data worker is killed",
        3,
        "loading data in workers failed: ",
        in_sample(kill_self),
        ("data.workers=2",),
    ),
    Row(
        "17",
        "a data worker is stuck",
        3,
        "no mini-batch for data.timeout=1 seconds",
        in_sample(threading.Event().wait),
        ("data.workers=1", "data.timeout=1"),
        slow=True,
    ),
    Row("18", "a broken sample", 3, "sample 13: ValueError: torn", in_sample(raises(ValueError("torn")))),
    Row(
        "18",
        "a broken sample in a data worker",
        3,
        "sample 13: ValueError: torn",
        in_sample(raises(ValueError("torn"))),
        ("data.workers=2",),
        slow=True,
    ),
    Row("18", "a label out of range", 3, "label 3 is out of range", in_sample(lambda: 3)),
    Row(
        "18",
        "no data",
        3,
        "has no samples to train on",
        arguments=("data.length=0",),
        after=no_run_was_written,
    ),
    Row(
        "19", "a layer raises", 1, "ValueError: broken", in_layer(raises(ValueError("broken"))), resumes=True
    ),
    Row("20", "a layer exits", 1, "SystemExit", in_layer(raises(SystemExit(0)))),
    Row(
        "20",
        "a layer raises KeyboardInterrupt",
        130,
        "stopped by",
        in_layer(raises(KeyboardInterrupt())),
        slow=True,
    ),
    Row(
        "20", "a layer raises GeneratorExit", 1, "GeneratorExit", in_layer(raises(GeneratorExit())), slow=True
    ),
    Row(
        "21",
        "a layer never returns",
        7,
        "workers did not end within step_timeout=4.0 seconds",
        in_layer(threading.Event().wait),
        ("step_timeout=4",),
        has_stuck_thread=True,
        resumes=True,
    ),
    Row(
        "21",
        "suspended for longer than step_timeout, which counted that time",
        0,
        "",
        in_layer(suspend(2.5)),
        ("step_timeout=2",),
    ),
    Row(
        "25",
        "Ctrl-C",
        130,
        "stopped by Ctrl-C; saved in run/",
        after_rows(3, send_signals(signal.SIGINT)),
        resumes=True,
    ),
    Row(
        "25",
        "Ctrl-C twice",
        130,
        "stopped by Ctrl-C at once; saved in run/snapshots/step-00000002",
        after_rows(3, after_pending_save(send_signals(signal.SIGINT, signal.SIGINT))),
        resumes=True,
        slow=True,
    ),
    Row(
        "25",
        "Ctrl-C twice within a step",
        130,
        "stopped by Ctrl-C at once",
        interrupt_twice,
        resumes=True,
        slow=True,
    ),
    Row(
        "26",
        "SIGTERM in a burst",
        75,
        "stopped by SIGTERM; saved in run/snapshots/step-00000003",
        after_rows(3, send_signals(*[signal.SIGTERM] * 6)),
        resumes=True,
        slow=True,
    ),
    *(
        Row(
            "26",
            f"SIGTERM in a burst while {doing}",
            75,
            "gpipe: stopped by SIGTERM\n",
            in_layer(send_signals(*[signal.SIGTERM] * 6)),
            arguments,
            before=on_one_core,
            after=no_run_was_written,
            needs_hydra=True,
        )
        for doing, arguments in (
            ("layers are timed", ("balance=time", "balance.measure=always")),
            ("a plan is searched", ("plan.auto=true",)),
        )
    ),
    Row(
        "26",
        "SIGUSR1",
        75,
        "stopped by SIGUSR1",
        after_rows(3, send_signals(signal.SIGUSR1)),
        resumes=True,
        slow=True,
    ),
    Row(
        "26",
        "SIGTERM to the whole group",
        75,
        "stopped by SIGTERM",
        after_rows(3, terminate_group),
        ("data.workers=2",),
        resumes=True,
        slow=True,
    ),
    Row(
        "27",
        "a second SIGTERM while the disk is slow",
        75,
        "stopped by SIGTERM; saved in run/snapshots/step-00000003",
        signal_again_during_slow_save,
        after=has_snapshots(2, 3),
        resumes=True,
    ),
    Row(
        "28",
        "killed, with data workers",
        -9,
        "",
        after_rows(3, kill_self),
        ("data.workers=2",),
        resumes=True,
        slow=True,
    ),
    Row(
        "29",
        "the terminal closes: one SIGHUP of the shell, one of the kernel",
        75,
        "stopped by SIGHUP; saved in run/snapshots/step-00000003",
        after_rows(3, send_signals(signal.SIGHUP, signal.SIGHUP)),
        resumes=True,
        slow=True,
    ),
    Row(
        "30",
        "the time limit comes near",
        75,
        "stopped by time_limit=1h",
        after_rows(3, let_an_hour_pass),
        ("time_limit=1h",),
        resumes=True,
    ),
    Row(
        "33",
        "two runs in one directory",
        2,
        "in use by process ",
        before=start_other_run,
        after=other_run_finishes,
        command=RESUME,
    ),
    Row(
        "32",
        "three launches in one second",
        0,
        "run directory: runs/train/model/20260101-120000",
        stop_the_clock,
        before=start_two_more,
        after=each_has_its_own_directory,
        command=TRAIN,
        slow=True,
    ),
    Row(
        "34",
        "the lock of a dead process",
        0,
        "",
        before=with_damaged_snapshot(leave_a_lock_file),
        command=RESUME,
        slow=True,
    ),
    Row(
        "35",
        "resumed with other partitions",
        0,
        "",
        before=copy_stopped_run,
        command=(*RESUME, "partitions=3"),
    ),
    Row(
        "36",
        "resumed with another optimizer",
        2,
        "optimizer._target_=torch.optim.SGD: the run was started with",
        before=copy_stopped_run,
        command=(*RESUME, "optimizer=sgd"),
        needs_hydra=True,
        slow=True,
    ),
    Row(
        "37",
        "a torn line in metrics.jsonl",
        0,
        "",
        before=with_damaged_snapshot(tear_a_line),
        command=RESUME,
        slow=True,
    ),
    Row(
        "38",
        "the summary cannot be written",
        0,
        "warning: run/summary.json: cannot be written",
        after_rows(2, lambda: Path("run/summary.json").mkdir()),
    ),
    Row(
        "39",
        "killed after the last step of an epoch",
        -9,
        "",
        after_rows(4, kill_self),
        resumes=True,
        slow=True,
    ),
    Row("39", "killed after its evaluation", -9, "", after_rows(5, kill_self), resumes=True, slow=True),
]


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the run that rows start from, and import everything that is imported late before the first fork."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        stop = after_rows(6, send_signals(signal.SIGTERM))
        patch.setattr(MetricsFile, "write", MetricsFile.write)
        stop()
        assert main([*TRAIN, "run_dir=run"]) == 75
    TEMPLATE[:] = [folder / "run"]


def check(row: Row, sandbox: Sandbox) -> None:
    row.before(sandbox)
    code = sandbox.launch(
        *row.command, *row.arguments, inject=row.inject, has_stuck_thread=row.has_stuck_thread
    )
    assert code == row.code, sandbox.stderr
    assert row.message in sandbox.stderr, sandbox.stderr
    assert "Traceback" not in sandbox.stderr and sandbox.stderr.count("gpipe: ") == (code > 0), sandbox.stderr
    row.after(sandbox)
    assert sandbox.all_ended(), "processes are still running"
    if row.resumes:
        assert sandbox.launch(*TRAIN, *row.arguments, "run_dir=run", "resume=auto") == 0, sandbox.stderr
    if row.resumes or (row.command[: len(RESUME)] == RESUME and code == 0):
        assert sandbox.rows() == ROWS
        assert not list(sandbox.run.rglob("*.tmp")) and not (sandbox.run / "run.lock").exists()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="processes are watched as Linux lets us")
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row.number}: {row.fault}", marks=[pytest.mark.slow] if row.slow else [])
        for row in TABLE
    ],
)
def test_a_fault_ends_as_the_table_says(tmp_path: Path, row: Row) -> None:
    command = main if row.needs_hydra else train_without_hydra
    run_in_sandbox(tmp_path, row.limit, command, lambda sandbox: check(row, sandbox))


@pytest.mark.slow
def test_all_faults_end_the_same_way_on_the_command_line(tmp_path: Path) -> None:
    for number, row in enumerate(TABLE):
        folder = tmp_path / str(number)
        folder.mkdir()
        run_in_sandbox(folder, row.limit, main, lambda sandbox, row=row: check(row, sandbox))
