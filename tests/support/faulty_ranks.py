"""A model that fails inside a rank if an environment variable says so: no test can reach into a rank's process.

The layer that fails is in the last of two partitions, so rank 1 fails, once, in the third step of each attempt. If
several faults are named, each new attempt gets the next one.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.autograd import Function

from gpipe_cli.runs.snapshots import contents
from gpipe_cli.training.signals import STOP_SIGNALS
from tests.support import faulty

FAULT = "GPIPE_TEST_FAULT"
HAPPENED = Path("happened")
"""Holds one byte per fault that has happened."""
SOCKETS = Path("sockets.json")
GO = Path("go")
"""A paused rank continues when this file exists."""
HEARD = threading.Event()
LISTENING = "0A"  # the state in /proc/net/tcp
IN_THE_THIRD_STEP = 6
"""Calls with a graph until then: three in the first step, which also inspects the layer, two in each later step."""


class RaisesInBackward(Function):
    @staticmethod
    def forward(context: Any, input: Tensor) -> Tensor:
        return input.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> NoReturn:  # type: ignore[override]
        raise ValueError("broken backward")


def killed(input: Tensor) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead")


def stopped(input: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSTOP)
    return input


def raises(input: Tensor) -> NoReturn:
    raise ValueError("broken")


def paused(input: Tensor) -> Tensor:
    """Tell the test which rank on which host waits here, and wait for the test."""
    Path(f"paused.{os.environ['RANK']}.{socket.gethostname()}").touch()
    while not GO.exists():
        signal.sigtimedwait([], 0.05)
    return input


def launcher() -> int:
    """The parent of the process that forked this rank."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def launcher_gets(number: int) -> Callable[[Tensor], Tensor]:
    def send(input: Tensor) -> Tensor:
        SOCKETS.write_text(json.dumps(listening_addresses()))
        os.kill(launcher(), number)
        HEARD.wait()  # the launcher forwards the signal to this rank, which must not finish before
        os.kill(os.getpid(), number)  # once more, like a cluster scheduler that signals every process
        return input

    return send


def watch_stop_signals() -> None:
    """Set `HEARD` when a stop signal reaches this rank, whose handlers are installed before its imports."""
    for number in STOP_SIGNALS:
        note = signal.getsignal(number)
        if callable(note) and "RANK" in os.environ:
            signal.signal(number, lambda *heard, note=note: (note(*heard), HEARD.set()))


def terminated(input: Tensor) -> Tensor:
    """For engine=threads, where the process is the run."""
    os.kill(os.getpid(), signal.SIGTERM)
    return input


def interrupt_twice(input: Tensor) -> NoReturn:
    """The step never ends, so the run cannot honor the first request."""
    for _ in range(2):
        os.kill(launcher(), signal.SIGINT)
        signal.sigtimedwait([], 1)  # a pending signal would absorb the next one
    threading.Event().wait()
    raise AssertionError("waits forever")


def listening_addresses() -> list[str]:
    """The addresses on which the launcher, its server and its ranks listen, as /proc writes them in hexadecimal."""
    server = os.getppid()
    ranks = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    held = {
        str(handle.readlink())
        for process in (launcher(), server, *ranks)
        for handle in Path(f"/proc/{process}/fd").iterdir()
        if handle.is_symlink()
    }
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in held]


IN_LAYER: Mapping[str, Callable[[Tensor], Any]] = {
    "killed": killed,
    "stopped": stopped,
    "paused": paused,
    "raises": raises,
    "raises in backward": RaisesInBackward.apply,
    "terminated": terminated,
    "launcher terminated": launcher_gets(signal.SIGTERM),
    "launcher interrupted twice": interrupt_twice,
    "launcher killed": launcher_gets(signal.SIGKILL),
}


def raises_while_saving(*_: Any, **__: Any) -> NoReturn:
    raise ValueError("broken while saving")


def full_disk(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


IN_WRITER: Mapping[str, Callable[..., NoReturn]] = {
    "raises while saving": raises_while_saving,
    "full disk": full_disk,
}


def due() -> str:
    """The fault of this attempt, or ""."""
    left = os.environ.get(FAULT, "").split(", ")[HAPPENED.stat().st_size if HAPPENED.exists() else 0 :]
    return left[0] if left else ""


def model(num_classes: int, width: int = 4) -> nn.Module:
    fault = due()
    calls = 0

    def layer(input: Tensor) -> Tensor:
        nonlocal calls
        # Count only real tensors: the ranks infer boundary shapes with tensors that hold no data.
        calls += type(input) is Tensor and (input.requires_grad or input.grad_fn is not None)
        if fault not in IN_LAYER or calls != IN_THE_THIRD_STEP:
            return input
        calls += 1
        with HAPPENED.open("ab") as file:
            file.write(b".")
        output: Tensor = IN_LAYER[fault](input)
        return output

    faulty.in_layer = layer
    if fault:
        watch_stop_signals()
    if fault in IN_WRITER and os.environ.get("RANK") == "1":
        contents.write_files = IN_WRITER[fault]
    return faulty.model(num_classes, width)
