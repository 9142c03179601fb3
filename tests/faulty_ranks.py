"""A model that breaks inside a rank when its environment says so: ranks are processes that no test can reach into.

The layer that breaks is in the last of two partitions, so it is rank 1 that does; in the third step, as elsewhere.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.autograd import Function

from gpipe_cli.training import signals
from gpipe_cli.training.snapshot import contents
from tests import faulty

FAULT = "GPIPE_TEST_FAULT"
FIRST_ATTEMPT = Path("first-attempt")
SOCKETS = Path("sockets.json")
HEARD = threading.Event()
LISTENING = "0A"  # the state in /proc/net/tcp


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


def killed_once(input: Tensor) -> Tensor:
    if FIRST_ATTEMPT.exists():
        return input
    FIRST_ATTEMPT.touch()
    killed(input)


def stopped(input: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGSTOP)
    return input


def raises(input: Tensor) -> NoReturn:
    raise ValueError("broken")


def launcher_gets(number: int) -> Callable[[Tensor], Tensor]:
    def send(input: Tensor) -> Tensor:
        if not SOCKETS.exists():
            SOCKETS.write_text(json.dumps(listening_addresses()))
            os.kill(os.getppid(), number)
            HEARD.wait()  # it comes back to this rank, which must not be through before it does
            os.kill(os.getpid(), number)  # and again, from a scheduler that signals every process
        return input

    return send


def hear() -> None:
    note = signals.StopRequests.note

    def noted(self: signals.StopRequests, number: int, frame: object) -> None:
        note(self, number, frame)
        HEARD.set()

    signals.StopRequests.note = noted  # type: ignore[method-assign]


def terminated(input: Tensor) -> Tensor:
    """Not in a rank: on threads, where the process is the run."""
    if not FIRST_ATTEMPT.exists():
        FIRST_ATTEMPT.touch()
        os.kill(os.getpid(), signal.SIGTERM)
    return input


def interrupted_twice(input: Tensor) -> NoReturn:
    """This step will never end, so the first request cannot be heeded."""
    for _ in range(2):
        os.kill(os.getppid(), signal.SIGINT)
        signal.sigtimedwait([], 1)  # a signal that is pending would swallow the next
    threading.Event().wait()
    raise AssertionError("waits for ever")


def listening_addresses() -> list[str]:
    """Where the launcher and its ranks listen, in the hexadecimal of /proc."""
    launcher = os.getppid()
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    held = {
        str(handle.readlink())
        for process in (launcher, *children)
        for handle in Path(f"/proc/{process}/fd").iterdir()
        if handle.is_symlink()
    }
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in held]


IN_LAYER: Mapping[str, Callable[[Tensor], Any]] = {
    "killed": killed,
    "killed once": killed_once,
    "stopped": stopped,
    "raises": raises,
    "raises in backward": RaisesInBackward.apply,
    "terminated": terminated,
    "launcher terminated": launcher_gets(signal.SIGTERM),
    "launcher interrupted twice": interrupted_twice,
    "launcher killed": launcher_gets(signal.SIGKILL),
}


def full_disk(*_: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def model(num_classes: int, width: int = 4) -> nn.Module:
    fault = os.environ.get(FAULT)
    calls = 0

    def layer(input: Tensor) -> Tensor:
        nonlocal calls
        calls += input.requires_grad or input.grad_fn is not None
        found: Tensor = IN_LAYER[fault](input) if fault in IN_LAYER and calls > 8 else input
        return found

    faulty.in_layer = layer
    if fault is not None:
        hear()
    if fault == "full disk":
        contents.write_directory = full_disk
    return faulty.model(num_classes, width)
