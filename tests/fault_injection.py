"""Faults as they are injected: in a disk, a layer, a sample, a signal, or in what a run has left behind.

Each is a function called in the process of a run before it begins, or one that sets a scene. Modules are changed in
place, without a way back: every process that does so is a fork that ends with its run.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from gpipe_cli.training import metrics, run_directory, signals
from gpipe_cli.training.metrics import MetricsFile
from gpipe_cli.training.snapshot import durable, manager
from tests import faulty
from tests.scene import Scene
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
TEMPLATE: list[Path] = []
"""The directory of a run that stopped after step 5: made once, copied often."""


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


def interrupted_twice() -> None:
    """The second Ctrl-C comes as soon as the first has been taken notice of."""
    note, noted, left = signals.SignalInbox.handle, threading.Event(), [1]

    def heard(self: signals.SignalInbox, number: int, frame: object) -> None:
        noted.set()
        note(self, number, frame)

    def does() -> None:
        if left:
            left.pop()
            os.kill(os.getpid(), signal.SIGINT)
            noted.wait()
            os.kill(os.getpid(), signal.SIGINT)

    signals.SignalInbox.handle = heard  # type: ignore[method-assign]
    in_layer(does)()


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
    metrics.os = BadDisk("write", errno.EIO, good=4)  # type: ignore[assignment]


def pruning_is_killed() -> None:
    manager.verify = lambda path: killed()  # type: ignore[assignment]


def slow_disk_and_a_second_signal() -> None:
    """The first request is heeded with a save, during which the second one comes."""

    left = [signal.SIGTERM]

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, descriptor: int, content: Any) -> int:
            if left and "step-00000003" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                os.kill(os.getpid(), left.pop())
                time.sleep(0.3)
            return os.write(descriptor, content)

    durable.os = Slow()  # type: ignore[assignment]
    at_row(3, signalled(signal.SIGTERM))()


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


def same_second() -> None:
    class Stopped:
        @staticmethod
        def strftime(form: str) -> str:
            return "20260101-120000"

    run_directory.time = Stopped  # type: ignore[assignment]


def launched_with_others(scene: Scene) -> None:
    for _ in range(2):
        scene.start(*TRAIN, inject=same_second)


def each_has_its_own(scene: Scene) -> None:
    assert scene.nobody_left()
    made = list((scene.folder / "runs" / "train" / "model").iterdir())
    assert len(made) == 3 and all((run / "summary.json").exists() for run in made)
