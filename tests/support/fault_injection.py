"""The faults that tests inject: into the disk, a layer, a sample or a signal, or into the files of an earlier run.

A fault is a function that is called in the process of a run before the run starts, or one that prepares a sandbox.
They patch modules and never restore them: each such process is a fork that ends with its run.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from gpipe_cli.runs import directory as run_directory
from gpipe_cli.runs.snapshots import durable, manager
from gpipe_cli.training import metrics, signals
from gpipe_cli.training.metrics import MetricsFile
from tests.support import faulty
from tests.support.forked_run import DeadlyDisk
from tests.support.sandbox import Sandbox

ALLOW = "allow=[tests]"
TRAIN = (
    "train",
    "model._target_=tests.support.faulty.model",
    "data._target_=tests.support.faulty.data",
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
MORE_EPOCHS = 8


def rows(epochs: int) -> list[tuple[int, str]]:
    steps = range(1, 4 * epochs + 1)
    return [
        (step, split) for step in steps for split in ("train", "eval") if split == "train" or step % 4 == 0
    ]


ROWS = rows(epochs=2)
WIDE_MODEL = 100  # the width of a model whose snapshot has about SNAPSHOT_BYTES
SNAPSHOT_BYTES = 140_000
Inject = Callable[[], None]
SandboxStep = Callable[[Sandbox], None]
TEMPLATE: list[Path] = []
"""The directory of a run that stopped after step 5. Tests make it once and copy it."""


def after_rows(count: int, action: Inject) -> Inject:
    """Call `action` once metrics.jsonl has `count` rows."""

    def inject() -> None:
        left, write = count, MetricsFile.write

        def counted(self: MetricsFile, row: Any) -> None:
            nonlocal left
            write(self, row)
            left -= 1
            if left == 0:
                action()

        MetricsFile.write = counted  # type: ignore[method-assign]

    return inject


def send_signals(*numbers: int) -> Inject:
    def action() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return action


def after_pending_save(action: Inject) -> Inject:
    """Wait for the running save first, where a fault must not hit it."""

    def after() -> None:
        for thread in threading.enumerate():
            if thread.name == "gpipe-snapshot":
                thread.join()
        action()

    return after


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate_group() -> None:
    os.killpg(0, signal.SIGTERM)


def in_layer(action: Callable[[], Any]) -> Inject:
    """Call `action` in a layer from the third step on: a step runs two micro-batches and recomputes one of them."""

    def inject() -> None:
        calls = 0

        def layer(input: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            factor = action() if calls > 8 else None
            return input if factor is None else input * factor

        faulty.in_layer = layer

    return inject


def interrupt_twice() -> None:
    """Send the second SIGINT once the first one has been handled."""
    handle, handled, pending = signals.SignalInbox.handle, threading.Event(), [1]

    def handle_and_tell(self: signals.SignalInbox, number: int, frame: object) -> None:
        handled.set()
        handle(self, number, frame)

    def action() -> None:
        if pending:
            pending.pop()
            os.kill(os.getpid(), signal.SIGINT)
            handled.wait()
            os.kill(os.getpid(), signal.SIGINT)

    signals.SignalInbox.handle = handle_and_tell  # type: ignore[method-assign]
    in_layer(action)()


def suspend(seconds: float) -> Inject:
    """Suspend this process once, as Ctrl-Z does; another process continues it, as `fg` does."""
    pending = [seconds]

    def action() -> None:
        if pending:
            me = os.getpid()
            until_stopped = f"until grep -q '^State:.T' /proc/{me}/status; do sleep 0.05; done"
            subprocess.Popen(["sh", "-c", f"{until_stopped}; sleep {pending.pop()}; kill -CONT {me}"])
            os.kill(me, signal.SIGSTOP)

    return action


def overflow_gradients() -> None:
    def layer(input: Tensor) -> Tensor:
        output = input * 1
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))
        return output

    faulty.in_layer = layer


def in_sample(action: Callable[[], Any], broken: int = 13) -> Inject:
    def inject() -> None:
        faulty.in_sample = lambda index: action() if index == broken else index % 3

    return inject


def raises(error: BaseException) -> Callable[[], NoReturn]:
    def action() -> NoReturn:
        raise error

    return action


def kill_while_saving(calls: int) -> Inject:
    def inject() -> None:
        durable.os = DeadlyDisk(calls)  # type: ignore[assignment]

    return inject


class BadDisk:
    """Stands in for `os` in a module; one of its functions fails after `good` calls."""

    def __init__(self, call: str, number: int, good: int) -> None:
        self._call, self._number, self._good = call, number, good

    def __getattr__(self, name: str) -> Any:
        if name != self._call:
            return getattr(os, name)

        def fail_later(*arguments: Any) -> Any:
            self._good -= 1
            if self._good < 0:
                raise OSError(self._number, os.strerror(self._number))
            return getattr(os, name)(*arguments)

        return fail_later


def fail_snapshot_fsync() -> None:
    """Fail in the second snapshot, however many other files of the run are made durable before it."""
    unfinished = Path("run/snapshots") / f"step-00000004{durable.UNFINISHED}"

    def fsync(descriptor: int) -> None:
        if unfinished.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync(descriptor)

    class BadSnapshot:
        def __getattr__(self, name: str) -> Any:
            return fsync if name == "fsync" else getattr(os, name)

    durable.os = BadSnapshot()  # type: ignore[assignment]


def fail_log_writes() -> None:
    metrics.os = BadDisk("write", errno.EIO, good=4)  # type: ignore[assignment]


def kill_while_pruning() -> None:
    manager.verify_part = lambda *_: kill_self()  # type: ignore[assignment]


def signal_again_during_slow_save() -> None:
    """The run handles the first signal by saving, and the second signal comes during that save."""
    pending = [signal.SIGTERM]

    class SlowDisk:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, descriptor: int, content: Any) -> int:
            if pending and "step-00000003" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                os.kill(os.getpid(), pending.pop())
                time.sleep(0.3)
            return os.write(descriptor, content)

    durable.os = SlowDisk()  # type: ignore[assignment]
    after_rows(3, send_signals(signal.SIGTERM))()


def let_an_hour_pass() -> None:
    class Later:
        perf_counter = staticmethod(time.perf_counter)

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + 3600

    signals.time = Later  # type: ignore[assignment]


def fill_disk() -> None:
    with Path("run/filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def fill_disk_for_a_while() -> None:
    after_rows(2, fill_disk)()
    after_rows(35, lambda: Path("run/filler").unlink())()


def with_disk_of(size: int) -> SandboxStep:
    return lambda sandbox: sandbox.mount(size)


def remount_read_only(sandbox: Sandbox) -> None:
    sandbox.mount(SNAPSHOT_BYTES)
    sandbox.remount_read_only()


def copy_stopped_run(sandbox: Sandbox) -> None:
    """Provide a run that stopped after step 5, with snapshots of steps 4 and 5."""
    shutil.copytree(TEMPLATE[0], sandbox.run)


def with_damaged_snapshot(damage: Callable[[Path], None]) -> SandboxStep:
    def before(sandbox: Sandbox) -> None:
        copy_stopped_run(sandbox)
        damage(sandbox.run / "snapshots" / "step-00000005")

    return before


def truncate(snapshot: Path) -> None:
    path = snapshot / "optimizer.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(snapshot: Path) -> None:
    path = snapshot / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def remove_manifest(snapshot: Path) -> None:
    (snapshot / "manifest.json").unlink()


def remove_a_file(snapshot: Path) -> None:
    (snapshot / "optimizer.safetensors").unlink()


def leave_a_partial_snapshot(snapshot: Path) -> None:
    part = snapshot.with_name("step-00000006.tmp")
    part.mkdir()
    (part / "model.safetensors").write_bytes(b"half")


def tear_a_line(snapshot: Path) -> None:
    with (snapshot.parents[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "split": "tra')


def leave_a_lock_file(snapshot: Path) -> None:
    (snapshot.parents[1] / "run.lock").write_text('{"pid": 1, "host": "elsewhere", "started": "2026"}')


def start_other_run(sandbox: Sandbox) -> None:
    """Let another process train in the run directory; it waits for `release`."""
    copy_stopped_run(sandbox)
    os.mkfifo(sandbox.folder / "held")
    os.mkfifo(sandbox.folder / "release")

    def hold() -> None:
        Path("held").open("w").close()
        Path("release").open().close()

    sandbox.running = sandbox.start(*RESUME, inject=after_rows(1, hold))
    (sandbox.folder / "held").open().close()


def other_run_finishes(sandbox: Sandbox) -> None:
    (sandbox.folder / "release").open("w").close()
    assert sandbox.running is not None and sandbox.wait(sandbox.running) == 0
    assert sandbox.rows() == ROWS


def stop_the_clock() -> None:
    class StoppedClock:
        @staticmethod
        def strftime(form: str) -> str:
            return "20260101-120000"

    run_directory.time = StoppedClock  # type: ignore[assignment]


def on_one_core(sandbox: Sandbox) -> None:
    """A measurement with several cores would wait for OpenMP threads that the fork of this process does not have."""
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])


def start_two_more(sandbox: Sandbox) -> None:
    for _ in range(2):
        sandbox.start(*TRAIN, inject=stop_the_clock)


def each_has_its_own_directory(sandbox: Sandbox) -> None:
    assert sandbox.all_ended()
    runs = list((sandbox.folder / "runs" / "train" / "model").iterdir())
    assert len(runs) == 3 and all((run / "summary.json").exists() for run in runs)
