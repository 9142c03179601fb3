"""A model that breaks inside a rank when its environment message so: ranks are processes that no test can reach into.

The layer that breaks is in the last of two partitions, so it is rank 1 that does, once, in the third step of each
attempt; if several faults are named, a new attempt has the next of them.
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

from gpipe_cli.engines import collectives
from gpipe_cli.training.signals import STOP_SIGNALS
from gpipe_cli.training.snapshot import contents
from tests import faulty

FAULT = "GPIPE_TEST_FAULT"
HAPPENED = Path("happened")
"""A byte for each fault that has."""
SOCKETS = Path("sockets.json")
HEARD = threading.Event()
LISTENING = "0A"  # the state in /proc/net/tcp
IN_THE_THIRD_STEP = 6
"""So many calls with a graph: three in the first step, which is also looked at, and two in each further one."""


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


def launcher_gets(number: int) -> Callable[[Tensor], Tensor]:
    def send(input: Tensor) -> Tensor:
        SOCKETS.write_text(json.dumps(listening_addresses()))
        os.kill(os.getppid(), number)
        HEARD.wait()  # it comes back to this rank, which must not be through before it does
        os.kill(os.getpid(), number)  # and again, from a scheduler that signals every process
        return input

    return send


def hear() -> None:
    """In a rank, which listens since before it imported anything."""
    for number in STOP_SIGNALS:
        note = signal.getsignal(number)
        if callable(note) and "RANK" in os.environ:
            signal.signal(number, lambda *heard, note=note: (note(*heard), HEARD.set()))


def terminated(input: Tensor) -> Tensor:
    """Not in a rank: on threads, where the process is the run."""
    os.kill(os.getpid(), signal.SIGTERM)
    return input


def interrupt_twice(input: Tensor) -> NoReturn:
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
    "stopped": stopped,
    "raises": raises,
    "raises in backward": RaisesInBackward.apply,
    "terminated": terminated,
    "launcher terminated": launcher_gets(signal.SIGTERM),
    "launcher interrupted twice": interrupt_twice,
    "launcher killed": launcher_gets(signal.SIGKILL),
}


def raises_while_saving(*_: Any) -> NoReturn:
    raise ValueError("broken while saving")


def full_disk(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def due() -> str:
    """The fault that this attempt is to have."""
    left = os.environ.get(FAULT, "").split(", ")[HAPPENED.stat().st_size if HAPPENED.exists() else 0 :]
    return left[0] if left else ""


def model(num_classes: int, width: int = 4) -> nn.Module:
    fault = due()
    calls = 0

    def layer(input: Tensor) -> Tensor:
        nonlocal calls
        # Of tensors that hold numbers: what crosses to other ranks is found with such as do not.
        calls += type(input) is Tensor and (input.requires_grad or input.grad_fn is not None)
        if fault not in IN_LAYER or calls != IN_THE_THIRD_STEP:
            return input
        calls += 1
        with HAPPENED.open("ab") as file:
            file.write(b".")
        found: Tensor = IN_LAYER[fault](input)
        return found

    faulty.in_layer = layer
    if fault:
        hear()
    if fault == "raises while saving":
        collectives.send_tensors = raises_while_saving
    if fault == "full disk":
        contents.write_directory = full_disk
    return faulty.model(num_classes, width)
