"""A model that breaks inside a rank when its environment says so: ranks are processes that no test can reach into.

The layer that breaks is in the last of two partitions, so it is rank 1 that does; in the third step, as elsewhere.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.autograd import Function

from gpipe_cli.training.snapshot import contents
from tests import faulty

FAULT = "GPIPE_TEST_FAULT"
FIRST_ATTEMPT = Path("first-attempt")
SOCKETS = Path("sockets.json")
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
        return input

    return send


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
    "launcher terminated": launcher_gets(signal.SIGTERM),
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
    if fault == "full disk":
        contents.write_directory = full_disk
    return faulty.model(num_classes, width)
