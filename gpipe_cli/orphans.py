"""A process that ends with the one that started it, however that ends.

A parent that is killed cannot end its children, and one that is stuck or waits for another never notices. Linux can
be asked to kill it then; elsewhere only a parent that has died already is noticed.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

_SIGNAL_AT_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG


def end_with(parent: int) -> None:
    """To be called by the child, with the process id of its parent."""
    with suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(_SIGNAL_AT_DEATH_OF_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it has died meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
