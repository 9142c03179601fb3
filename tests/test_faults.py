"""What can go wrong with a training run, as one table: what happens, how the process ends, and that it can go on.

Every row is a real process and a real fault. It ends by itself, in one line with the right exit code, and leaves no
process, no thread and nothing half-written; where a run can go on it does, without a gap or a repeat. The numbers are
those of the matrix in the notes; those about several processes of training are in `test_rank_faults`.
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
from tests.fault_findings import (
    all_rows,
    has_snapshots,
    make_room,
    nothing_was_made,
    only_what_a_run_leaves,
    whole_rows,
)
from tests.fault_injection import (
    ALLOW,
    LONGER,
    RESUME,
    ROWS,
    TEMPLATE,
    TRAIN,
    WEIGHT,
    WIDE,
    Act,
    Inject,
    an_hour_passes,
    at_row,
    began,
    damaged,
    disk_killed,
    each_has_its_own,
    fill,
    filled_for_a_while,
    flip_a_bit,
    gradients_overflow,
    group_signalled,
    in_layer,
    in_sample,
    in_use,
    interrupted_twice,
    killed,
    launched_with_others,
    leave_a_lock,
    leave_a_part,
    lines_fail,
    lose_a_file,
    lose_the_manifest,
    on_a_disk,
    pruning_is_killed,
    raises,
    read_only,
    same_second,
    saved,
    signalled,
    slow_disk_and_a_second_signal,
    snapshot_fsync_fails,
    tear_a_line,
    the_first_is_unharmed,
    truncate,
)
from tests.scene import Scene, play
from tests.without_hydra import composed


def nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Row:
    number: str
    """In the notes' matrix."""
    fault: str
    code: int
    """0 to 130, or the negative number of a signal."""
    says: str
    inject: Inject = nothing
    """In the process of the run, before it begins."""
    words: tuple[str, ...] = ()
    before: Act = nothing
    after: Act = nothing
    resumes: bool = False
    """Whether going on with it, with nothing injected, ends it as if nothing had happened."""
    command: tuple[str, ...] = (*TRAIN, "run_dir=run")
    stuck: bool = False
    """Whether a thread cannot end, and must not keep the process from doing so."""
    hydra: bool = False
    """Whether its words need Hydra."""
    slow: bool = False
    """Whether it is left to `-m slow`: another row, or another test, proves nearly the same."""
    limit: float = 120.0
    """Seconds until it is said to hang: generous, since timing decides nothing else."""


TABLE = [
    Row("1", "killed while a snapshot is written", -9, "", disk_killed(30), resumes=True),
    Row("2", "killed between a save and the removal of an old one", -9, "", pruning_is_killed, resumes=True),
    Row(
        "3",
        "the disk is full when a snapshot is written",
        6,
        "step-00000004: the snapshot cannot be written: [Errno 28] No space left on device; it needs ",
        at_row(3, saved(fill)),
        (f"model.width={WIDE}",),
        before=on_a_disk(8 * WEIGHT),
        after=make_room,
        resumes=True,
    ),
    Row(
        "4",
        "the disk is full for a while, under the logs alone",
        0,
        "No space left on device; training goes on",
        filled_for_a_while,
        ("snapshot.every=100", f"epochs={LONGER}"),
        before=on_a_disk(8 * WEIGHT),
        after=all_rows,
    ),
    Row(
        "40",
        "killed in the middle of a step of a run whose model is on the disk",
        -9,
        "",
        in_layer(killed),
        ("engine=offload", "engine.to=disk", "engine.slices=2"),
        after=only_what_a_run_leaves,
        resumes=True,
        hydra=True,
    ),
    Row(
        "40",
        "the disk has no room for the model",
        6,
        "the offloaded model cannot be kept there: No space left on device; ",
        words=("engine=offload", "engine.to=disk", "engine.slices=2", f"model.width={WIDE}"),
        before=on_a_disk(WEIGHT),
        after=nothing_was_made,
        hydra=True,
    ),
    Row("4", "the disk fails under the logs, for good", 0, "Input/output", lines_fail, after=whole_rows),
    Row(
        "5",
        "fsync fails in a snapshot",
        6,
        "[Errno 5] Input/output error; it needs ",
        snapshot_fsync_fails,
        after=has_snapshots(2),
        resumes=True,
    ),
    Row(
        "6",
        "room for one snapshot, three are planned",
        6,
        "3 snapshots of about ",
        words=(f"model.width={WIDE}",),
        before=on_a_disk(2 * WEIGHT),
        after=has_snapshots(2),
    ),
    Row(
        "6",
        "no room for a single snapshot",
        6,
        "run: no room for a snapshot: it needs about ",
        words=(f"model.width={WIDE}",),
        before=on_a_disk(WEIGHT // 2),
        after=nothing_was_made,
    ),
    Row("7", "the run directory is read-only", 6, "is not writable", before=read_only),
    Row("8", "the newest snapshot is cut", 0, "has ", before=damaged(truncate), command=RESUME),
    Row("9", "a bit of it has flipped", 0, "its sha256 is ", before=damaged(flip_a_bit), command=RESUME),
    Row(
        "10", "it has no manifest", 0, "an incomplete one", before=damaged(lose_the_manifest), command=RESUME
    ),
    Row("10", "it lacks a file", 0, "or not there", before=damaged(lose_a_file), command=RESUME, slow=True),
    Row(
        "10",
        "a damaged one is asked for by name",
        4,
        "step-00000005/optimizer.safetensors: damaged",
        before=damaged(lose_a_file),
        command=("train", "resume=run/snapshots/step-00000005", ALLOW),
    ),
    Row("11", "half of a snapshot was left", 0, "", before=damaged(leave_a_part), command=RESUME),
    Row(
        "12",
        "not a number in a layer",
        5,
        "step 3, epoch 1",
        in_layer(lambda: float("nan")),
        after=has_snapshots(2),
        resumes=True,
    ),
    Row(
        "13",
        "fp16 gradients that overflow at every scale",
        5,
        "overflowed in 20 steps in a row",
        gradients_overflow,
        ("precision=fp16", "epochs=20", "snapshot.every=1000"),
    ),
    Row(
        "14",
        "memory that cannot be had",
        6,
        "bytes could not be had; try more chunks, checkpoint=always",
        in_layer(lambda: torch.empty(2**46)),
        resumes=True,
    ),
    Row(
        "16",
        "a data worker is killed",
        3,
        "loading data in workers failed: ",
        in_sample(killed),
        ("data.workers=2",),
    ),
    Row(
        "17",
        "a data worker is stuck",
        3,
        "no mini-batch for data.timeout=1 seconds",
        in_sample(threading.Event().wait),
        ("data.workers=1", "data.timeout=1"),
    ),
    Row("18", "a broken sample", 3, "sample 13: ValueError: torn", in_sample(raises(ValueError("torn")))),
    Row(
        "18",
        "a broken sample in a data worker",
        3,
        "sample 13: ValueError: torn",
        in_sample(raises(ValueError("torn"))),
        ("data.workers=2",),
    ),
    Row("18", "a label out of range", 3, "label 3 is out of range", in_sample(lambda: 3)),
    Row("18", "no data", 3, "has no samples to train on", words=("data.length=0",), after=nothing_was_made),
    Row(
        "19", "a layer raises", 1, "ValueError: broken", in_layer(raises(ValueError("broken"))), resumes=True
    ),
    Row("20", "a layer exits", 1, "SystemExit", in_layer(raises(SystemExit(0)))),
    Row("20", "a layer raises KeyboardInterrupt", 130, "stopped by", in_layer(raises(KeyboardInterrupt()))),
    Row(
        "20", "a layer raises GeneratorExit", 1, "GeneratorExit", in_layer(raises(GeneratorExit())), slow=True
    ),
    Row(
        "21",
        "a layer never returns",
        7,
        "workers did not end within step_timeout=1.0 seconds",
        in_layer(threading.Event().wait),
        ("step_timeout=1",),
        stuck=True,
        resumes=True,
    ),
    Row(
        "25",
        "Ctrl-C",
        130,
        "stopped by Ctrl-C; saved in run/",
        at_row(3, signalled(signal.SIGINT)),
        resumes=True,
    ),
    Row(
        "25",
        "Ctrl-C twice",
        130,
        "stopped by Ctrl-C at once; saved in run/snapshots/step-00000002",
        at_row(3, saved(signalled(signal.SIGINT, signal.SIGINT))),
        resumes=True,
    ),
    Row(
        "25",
        "Ctrl-C twice within a step",
        130,
        "stopped by Ctrl-C at once",
        interrupted_twice,
        resumes=True,
    ),
    Row(
        "26",
        "SIGTERM in a burst",
        75,
        "stopped by SIGTERM; saved in run/snapshots/step-00000003",
        at_row(3, signalled(*[signal.SIGTERM] * 6)),
        resumes=True,
    ),
    *(
        Row(
            "26",
            f"SIGTERM in a burst while {doing}",
            75,
            "gpipe: stopped by SIGTERM\n",
            in_layer(signalled(*[signal.SIGTERM] * 6)),
            words,
            after=nothing_was_made,
            hydra=True,
        )
        for doing, words in (
            ("layers are timed", ("balance=time",)),
            ("a plan is searched", ("plan.auto=true",)),
        )
    ),
    Row(
        "26",
        "SIGUSR1",
        75,
        "stopped by SIGUSR1",
        at_row(3, signalled(signal.SIGUSR1)),
        resumes=True,
        slow=True,
    ),
    Row(
        "26",
        "SIGTERM to the whole group",
        75,
        "stopped by SIGTERM",
        at_row(3, group_signalled),
        ("data.workers=2",),
        resumes=True,
    ),
    Row(
        "27",
        "a second SIGTERM while the disk is slow",
        75,
        "stopped by SIGTERM; saved in run/snapshots/step-00000003",
        slow_disk_and_a_second_signal,
        after=has_snapshots(2, 3),
        resumes=True,
    ),
    Row("28", "killed, with data workers", -9, "", at_row(3, killed), ("data.workers=2",), resumes=True),
    Row(
        "29",
        "the terminal closes: one SIGHUP of the shell, one of the kernel",
        75,
        "stopped by SIGHUP; saved in run/snapshots/step-00000003",
        at_row(3, signalled(signal.SIGHUP, signal.SIGHUP)),
        resumes=True,
    ),
    Row(
        "30",
        "the time limit comes near",
        75,
        "stopped by time_limit=1h",
        at_row(3, an_hour_passes),
        ("time_limit=1h",),
        resumes=True,
    ),
    Row(
        "33",
        "two runs in one directory",
        2,
        "in use by process ",
        before=in_use,
        after=the_first_is_unharmed,
        command=RESUME,
    ),
    Row(
        "32",
        "three launches in one second",
        0,
        "run directory: runs/train/model/20260101-120000",
        same_second,
        before=launched_with_others,
        after=each_has_its_own,
        command=TRAIN,
        slow=True,
    ),
    Row("34", "the lock of a dead process", 0, "", before=damaged(leave_a_lock), command=RESUME),
    Row("35", "resumed with other partitions", 0, "", before=began, command=(*RESUME, "partitions=3")),
    Row(
        "36",
        "resumed with another optimizer",
        2,
        "optimizer._target_=torch.optim.SGD: the run was started with",
        before=began,
        command=(*RESUME, "optimizer=sgd"),
        hydra=True,
    ),
    Row("37", "a torn line in metrics.jsonl", 0, "", before=damaged(tear_a_line), command=RESUME),
    Row(
        "38",
        "the summary cannot be written",
        0,
        "warning: run/summary.json: cannot be written",
        at_row(2, lambda: Path("run/summary.json").mkdir()),
    ),
    Row("39", "killed after the last step of an epoch", -9, "", at_row(4, killed), resumes=True),
    Row("39", "killed after its evaluation", -9, "", at_row(5, killed), resumes=True, slow=True),
]


@pytest.fixture(scope="module", autouse=True)
def template(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run to begin from; and whatever is imported late is imported before the first fork."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        stop = at_row(6, signalled(signal.SIGTERM))
        patch.setattr(MetricsFile, "write", MetricsFile.write)
        stop()
        assert main([*TRAIN, "run_dir=run"]) == 75
    TEMPLATE[:] = [folder / "run"]


def check(row: Row, scene: Scene) -> None:
    row.before(scene)
    code = scene.launch(*row.command, *row.words, inject=row.inject, stuck=row.stuck)
    assert code == row.code, scene.said
    assert row.says in scene.said, scene.said
    assert "Traceback" not in scene.said and scene.said.count("gpipe: ") == (code > 0), scene.said
    row.after(scene)
    assert scene.nobody_left(), "processes are left"
    if row.resumes:
        assert scene.launch(*TRAIN, *row.words, "run_dir=run", "resume=auto") == 0, scene.said
    if row.resumes or (row.command[: len(RESUME)] == RESUME and code == 0):
        assert scene.rows() == ROWS
        assert not list(scene.run.rglob("*.tmp")) and not (scene.run / "run.lock").exists()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="processes are watched as Linux lets us")
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row.number}: {row.fault}", marks=[pytest.mark.slow] if row.slow else [])
        for row in TABLE
    ],
)
def test_a_fault_ends_as_the_table_says(tmp_path: Path, row: Row) -> None:
    play(tmp_path, row.limit, main if row.hydra else composed, lambda scene: check(row, scene))


@pytest.mark.slow
def test_they_all_end_so_on_the_command_line(tmp_path: Path) -> None:
    for number, row in enumerate(TABLE):
        folder = tmp_path / str(number)
        folder.mkdir()
        play(folder, row.limit, main, lambda scene, row=row: check(row, scene))
