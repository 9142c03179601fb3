"""What can go wrong with a training run, as one table: what happens, how the process ends, and that it can go on.

Every row is a real process and a real fault. It ends by itself, in one line with the right exit code, and leaves no
process, no thread and nothing half-written; where a run can go on it does, without a gap or a repeat. The numbers are
those of the matrix in the notes; rows about several processes of training wait for engines that have them.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from gpipe_cli.cli import main
from gpipe_cli.training import line_file, signals
from gpipe_cli.training.metrics import MetricsFile
from gpipe_cli.training.snapshot import durable, keeper
from tests import faulty
from tests.scene import Scene, play
from tests.training.session import DeadlyDisk

ALLOW = "allow=[tests]"
TRAIN = (
    "train",
    "model._target_=tests.faulty.model",
    "data._target_=tests.faulty.data",
    ALLOW,
    "transform=none",
    "batch_size=6",
    "chunks=2",
    "epochs=2",
    "threads=1",
    "log.every=1",
    "snapshot.every=2",
    "snapshot.keep=2",
    "snapshot.monitor=null",
)
RESUME = ("train", "resume=run", ALLOW)
LONGER = 8


def rows(epochs: int) -> list[tuple[int, str]]:
    steps = range(1, 4 * epochs + 1)
    return [
        (step, split) for step in steps for split in ("train", "eval") if split == "train" or step % 4 == 0
    ]


ROWS = rows(epochs=2)
WIDE = 100  # the model's width where a snapshot has to weigh something: about 140 KB
WEIGHT = 140_000
Inject = Callable[[], None]
Act = Callable[[Scene], None]


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
    limit: float = 60.0
    """Seconds until it is said to hang: generous, since timing decides nothing else."""


# Faults ----------------------------------------------------------------------------------------------------------


def at_row(count: int, happens: Inject) -> Inject:
    """Something happens as soon as that many rows of metrics.jsonl have been written."""

    def inject() -> None:
        left, write = count, MetricsFile.write

        def counted(self: MetricsFile, row: Any) -> None:
            nonlocal left
            write(self, row)
            left -= 1
            if left == 0:
                happens()

        MetricsFile.write = counted  # type: ignore[method-assign]

    return inject


def signalled(*numbers: int) -> Inject:
    def happens() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return happens


def saved(happens: Inject) -> Inject:
    """As soon as the save that is under way has ended: another row is about what is being saved."""

    def after() -> None:
        for thread in threading.enumerate():
            if thread.name == "gpipe-snapshot":
                thread.join()
        happens()

    return after


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def group_signalled() -> None:
    os.killpg(0, signal.SIGTERM)


def in_layer(does: Callable[[], Any]) -> Inject:
    """The layer misbehaves in the third step: in each it is called for two micro-batches and to recompute one."""

    def inject() -> None:
        calls = 0

        def layer(input: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            found = does() if calls > 8 else None
            return input if found is None else input * found

        faulty.in_layer = layer

    return inject


def gradients_overflow() -> None:
    def layer(input: Tensor) -> Tensor:
        output = input * 1
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))
        return output

    faulty.in_layer = layer


def in_sample(does: Callable[[], Any], index: int = 13) -> Inject:
    def inject() -> None:
        faulty.in_sample = lambda asked: does() if asked == index else asked % 3

    return inject


def raises(error: BaseException) -> Callable[[], NoReturn]:
    def does() -> NoReturn:
        raise error

    return does


def disk_killed(calls: int) -> Inject:
    def inject() -> None:
        durable.os = DeadlyDisk(calls)  # type: ignore[assignment]

    return inject


class BadDisk:
    """`os` for one module, with a call that fails from the n-th time on."""

    def __init__(self, call: str, number: int, good: int) -> None:
        self._call, self._number, self._good = call, number, good

    def __getattr__(self, name: str) -> Any:
        if name != self._call:
            return getattr(os, name)

        def bad(*arguments: Any) -> Any:
            self._good -= 1
            if self._good < 0:
                raise OSError(self._number, os.strerror(self._number))
            return getattr(os, name)(*arguments)

        return bad


def snapshot_fsync_fails() -> None:
    durable.os = BadDisk("fsync", errno.EIO, good=14)  # type: ignore[assignment]  # in the second snapshot


def lines_fail() -> None:
    line_file.os = BadDisk("write", errno.EIO, good=4)  # type: ignore[assignment]


def pruning_is_killed() -> None:
    keeper.verify = lambda path: killed()  # type: ignore[assignment]


def slow_disk_and_a_second_signal() -> None:
    """The first request is heeded with a save, which the second one interrupts."""

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, descriptor: int, content: Any) -> int:
            if STEP_3 in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.3)
            return os.write(descriptor, content)

    durable.os = Slow()  # type: ignore[assignment]
    at_row(3, signalled(signal.SIGTERM))()


STEP_3 = "step-00000003"


def an_hour_passes() -> None:
    class Later:
        perf_counter = staticmethod(time.perf_counter)

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + 3600

    signals.time = Later  # type: ignore[assignment]


def fill() -> None:
    with Path("run/filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def filled_for_a_while() -> None:
    at_row(2, fill)()
    at_row(35, lambda: Path("run/filler").unlink())()


# Scenes ----------------------------------------------------------------------------------------------------------


def on_a_disk(size: int) -> Act:
    return lambda scene: scene.mount(size)


def read_only(scene: Scene) -> None:
    scene.mount(WEIGHT)
    scene.read_only()


def began(scene: Scene) -> None:
    """A run that stopped after step 5, with snapshots of steps 4 and 5."""
    shutil.copytree(TEMPLATE[0], scene.run)


def damaged(damage: Callable[[Path], None]) -> Act:
    def before(scene: Scene) -> None:
        began(scene)
        damage(scene.run / "snapshots" / "step-00000005")

    return before


def truncate(snapshot: Path) -> None:
    path = snapshot / "optimizer.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(snapshot: Path) -> None:
    path = snapshot / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def lose_the_manifest(snapshot: Path) -> None:
    (snapshot / "manifest.json").unlink()


def lose_a_file(snapshot: Path) -> None:
    (snapshot / "optimizer.safetensors").unlink()


def leave_a_part(snapshot: Path) -> None:
    part = snapshot.with_name("step-00000006.tmp")
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")


def tear_a_line(snapshot: Path) -> None:
    with (snapshot.parents[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "split": "tra')


def leave_a_lock(snapshot: Path) -> None:
    (snapshot.parents[1] / "run.lock").write_text('{"pid": 1, "host": "elsewhere", "started": "2026"}')


def in_use(scene: Scene) -> None:
    """Another process trains in the run directory; it waits there for `release`."""
    began(scene)
    os.mkfifo(scene.folder / "held")
    os.mkfifo(scene.folder / "release")

    def wait() -> None:
        Path("held").open("w").close()
        Path("release").open().close()

    scene.first = scene.start(*RESUME, inject=at_row(1, wait))
    (scene.folder / "held").open().close()


def the_first_is_unharmed(scene: Scene) -> None:
    (scene.folder / "release").open("w").close()
    assert scene.first is not None and scene.end_of(scene.first) == 0
    assert scene.rows() == ROWS


# Findings --------------------------------------------------------------------------------------------------------


def has_snapshots(*steps: int) -> Act:
    """These and nothing else: no temporary, none of a step that failed."""

    def after(scene: Scene) -> None:
        assert scene.snapshots() == [f"step-{step:08d}" for step in steps], scene.snapshots()

    return after


def make_room(scene: Scene) -> None:
    """The failed save has left the one before, and nothing of itself."""
    has_snapshots(2)(scene)
    (scene.run / "filler").unlink()


def all_rows(scene: Scene) -> None:
    assert scene.rows() == rows(LONGER)
    assert scene.said.count("warning") == 1, scene.said
    log = (scene.run / "train.log").read_text().splitlines()
    assert all(line[:2] == "20" for line in log) and "step 32 " in log[-2], log


def whole_rows(scene: Scene) -> None:
    """The disk never came back: what is in the file is whole, and what is not is counted."""
    assert scene.rows() == ROWS[: len(scene.rows())] and len(scene.rows()) < len(ROWS)
    assert "training goes on" in scene.said and "are lost" in scene.said


def nothing_was_made(scene: Scene) -> None:
    assert not scene.run.exists() or not list(scene.run.iterdir())


def stacks_are_shown(scene: Scene) -> None:
    assert "Event" in scene.said or "wait" in scene.said


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
    Row("7", "the run directory is read-only", 6, "cannot be written to", before=read_only),
    Row("8", "the newest snapshot is cut", 0, "has ", before=damaged(truncate), command=RESUME),
    Row("9", "a bit of it has flipped", 0, "its sha256 is ", before=damaged(flip_a_bit), command=RESUME),
    Row(
        "10", "it has no manifest", 0, "an incomplete one", before=damaged(lose_the_manifest), command=RESUME
    ),
    Row("10", "it lacks a file", 0, "or not there", before=damaged(lose_a_file), command=RESUME),
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
        resumes=True,
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
    Row("20", "a layer raises GeneratorExit", 1, "GeneratorExit", in_layer(raises(GeneratorExit()))),
    Row(
        "21",
        "a layer never returns",
        7,
        "workers did not end within 1.0 seconds",
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
        in_layer(signalled(signal.SIGINT, signal.SIGINT)),
        resumes=True,
    ),
    Row("26", "SIGTERM", 75, "stopped by SIGTERM", at_row(3, signalled(signal.SIGTERM)), resumes=True),
    Row("26", "SIGUSR1", 75, "stopped by SIGUSR1", at_row(3, signalled(signal.SIGUSR1)), resumes=True),
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
        "stopped by SIGTERM at once; saved in run/snapshots/step-00000002",
        slow_disk_and_a_second_signal,
        after=has_snapshots(2),
        resumes=True,
    ),
    Row("28", "killed, with data workers", -9, "", at_row(3, killed), ("data.workers=2",), resumes=True),
    Row(
        "29",
        "the terminal closes",
        75,
        "stopped by SIGHUP",
        at_row(3, signalled(signal.SIGHUP)),
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
    Row("33", "two runs in one directory", 2, "in use by process ", before=in_use, command=RESUME),
    Row("34", "the lock of a dead process", 0, "", before=damaged(leave_a_lock), command=RESUME),
    Row(
        "36",
        "resumed with another optimizer",
        2,
        "optimizer._target_=torch.optim.SGD: the run was started with",
        before=began,
        command=(*RESUME, "optimizer=sgd"),
        resumes=True,
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
    Row("39", "killed after its evaluation", -9, "", at_row(5, killed), resumes=True),
]
QUICK = 22
TEMPLATE: list[Path] = []


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
    if row.before is in_use:
        the_first_is_unharmed(scene)
    assert scene.nobody_left(), "processes are left"
    row.after(scene)
    if row.resumes:
        assert scene.launch(*TRAIN, *row.words, "run_dir=run", "resume=auto") == 0, scene.said
    if row.resumes or (row.command is RESUME and code == 0):
        assert scene.rows() == ROWS
        assert not list(scene.run.rglob("*.tmp")) and not (scene.run / "run.lock").exists()


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="processes are watched as Linux lets us")
@pytest.mark.parametrize("row", TABLE, ids=[f"{row.number}: {row.fault}" for row in TABLE])
def test_a_fault_ends_as_the_table_says(tmp_path: Path, row: Row) -> None:
    play(tmp_path, row.limit, lambda scene: check(row, scene))
