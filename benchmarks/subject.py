"""One process under test. It prepares one system on one case and then does as it is told, step by step.

In a process of its own each system keeps its thread count and its memory to itself, and while another is
measured it sleeps in a read.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import final


@final
@dataclass(frozen=True)
class Failed:
    """The reply of a process that could not do what it was told; it has ended."""

    text: str


def main(
    connection: Connection, system: str, case: str, rank: int, meeting_file: str, checkout: str | None = None
) -> None:
    """Prepare, say so, then answer: a number of steps to run by the seconds of each, a word by a number."""
    try:
        if checkout is not None:
            _import_from(checkout)
        subject = _Subject(system, case, rank, meeting_file)
        connection.send(0.0)
        while (command := connection.recv()) != "stop":
            answer = subject.run(command) if isinstance(command, int) else getattr(subject, command)()
            connection.send(answer)
    except EOFError:
        pass  # the harness is gone
    except Exception:  # noqa: BLE001 - whatever it is belongs into the table, and must not hang the harness
        connection.send(Failed(traceback.format_exc()))
    # Threads and process groups of the peers end with the process; some of them do not end in another way.
    os._exit(0)


@final
class _Subject:
    """A system prepared on a case."""

    def __init__(self, system_name: str, case_name: str, rank: int, meeting_file: str) -> None:
        from benchmarks.cases import build
        from benchmarks.systems import SYSTEMS, Seat

        system = SYSTEMS[system_name]
        self._case = build(case_name)
        self._step = system.prepare(self._case, Seat(rank, meeting_file))
        self._memory_before = _memory("VmRSS")

    def run(self, steps: int) -> float:
        """Seconds per step; what lies between steps does not count."""
        return sum(self._timed_step() for _ in range(steps)) / steps

    def squared_norm(self) -> float:
        """Of all gradients of the last step."""
        gradients = (parameter.grad for parameter in self._case.model.parameters())
        return sum(gradient.double().square().sum().item() for gradient in gradients if gradient is not None)

    def memory(self) -> float:
        """The most bytes the process ever had."""
        return _memory("VmHWM")

    def memory_before(self) -> float:
        """The bytes it had before the first step."""
        return self._memory_before

    def _timed_step(self) -> float:
        for parameter in self._case.model.parameters():
            parameter.grad = None
        begin = time.perf_counter()
        self._step()
        return time.perf_counter() - begin


def _import_from(checkout: str) -> None:
    """Let gpipe_cli be the one of that folder; cases and systems stay those of the harness."""
    sys.path.insert(0, checkout)
    import gpipe_cli

    if not Path(gpipe_cli.__file__).is_relative_to(checkout):
        raise ModuleNotFoundError(f"{checkout} has no gpipe_cli")


def _memory(field: str) -> float:
    """Bytes, from /proc: ru_maxrss would tell the parent's peak too."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024.0
