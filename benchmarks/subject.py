"""One process under test. It prepares one system on one case and then executes the harness's commands.

A process of its own keeps each system's thread count and memory separate. While another system is measured, the process
sleeps in a read.
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
    """The reply of a process that failed and has ended."""

    text: str


def main(
    connection: Connection,
    system: str,
    case: str,
    rank: int,
    rendezvous_file: str,
    checkout: str | None = None,
) -> None:
    """Prepare the system, send 0.0, then answer each command until "stop".

    An integer runs that many steps and returns the seconds per step; a string names a method of `_Subject` to call.
    """
    try:
        if checkout is not None:
            _import_from(checkout)
        subject = _Subject(system, case, rank, rendezvous_file)
        connection.send(0.0)
        while (command := connection.recv()) != "stop":
            answer = subject.run(command) if isinstance(command, int) else getattr(subject, command)()
            connection.send(answer)
    except EOFError:
        pass  # the harness is gone
    except Exception:  # noqa: BLE001 - any failure belongs in the table and must not hang the harness
        connection.send(Failed(traceback.format_exc()))
    # Exit without cleanup: some peers' threads and process groups do not shut down otherwise.
    os._exit(0)


@final
class _Subject:
    """A system prepared on a case."""

    def __init__(self, system_name: str, case_name: str, rank: int, rendezvous_file: str) -> None:
        from benchmarks.cases import build
        from benchmarks.systems import SYSTEMS, Rendezvous

        system = SYSTEMS[system_name]
        self._case = build(case_name)
        self._step = system.prepare(self._case, Rendezvous(rank, rendezvous_file))
        self._memory_before = _memory("VmRSS")

    def run(self, steps: int) -> float:
        """Run the steps and return the seconds per step; work between steps does not count."""
        return sum(self._timed_step() for _ in range(steps)) / steps

    def squared_norm(self) -> float:
        """The squared norm of all gradients of the last step."""
        gradients = (parameter.grad for parameter in self._case.model.parameters())
        return sum(gradient.double().square().sum().item() for gradient in gradients if gradient is not None)

    def memory(self) -> float:
        """The peak memory of the process in bytes."""
        return _memory("VmHWM")

    def memory_before(self) -> float:
        """The memory of the process before the first step in bytes."""
        return self._memory_before

    def _timed_step(self) -> float:
        for parameter in self._case.model.parameters():
            parameter.grad = None
        begin = time.perf_counter()
        self._step()
        return time.perf_counter() - begin


def _import_from(checkout: str) -> None:
    """Import gpipe_cli from that folder; cases and systems stay those of the harness."""
    sys.path.insert(0, checkout)
    import gpipe_cli

    if not Path(gpipe_cli.__file__).is_relative_to(checkout):
        raise ModuleNotFoundError(f"{checkout} has no gpipe_cli")


def _memory(field: str) -> float:
    """Bytes, from /proc: ru_maxrss would include the parent's peak."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None, f"/proc/self/status has no {field}"
    return int(match[1]) * 1024.0
