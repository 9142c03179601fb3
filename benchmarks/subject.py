"""One process under test. It prepares one system on one case and then does as it is told, step by step.

In a process of its own each system keeps its thread count and its memory to itself, and while another is
measured it sleeps in a read.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, final


@final
@dataclass(frozen=True)
class Failed:
    """The reply of a process that could not do what it was told; it has ended."""

    text: str


class Answer(Protocol):
    def __call__(self) -> float: ...


def main(connection: Connection, system: str, case: str, rank: int, meeting_file: str) -> None:
    """Prepare, say so, then answer `step` (seconds), `norm` (squared gradient norm), `memory` (bytes)."""
    try:
        answers = _prepare(system, case, rank, meeting_file)
        connection.send(0.0)
        while (command := connection.recv()) != "stop":
            connection.send(answers[command]())
    except Exception:  # noqa: BLE001 - whatever it is belongs into the table, and must not hang the harness
        connection.send(Failed(traceback.format_exc()))
    # Threads and process groups of the peers end with the process; some of them do not end in another way.
    os._exit(0)


def _prepare(system_name: str, case_name: str, rank: int, meeting_file: str) -> dict[str, Answer]:
    import torch

    from benchmarks.cases import build
    from benchmarks.systems import SYSTEMS, Seat

    system = SYSTEMS[system_name]
    torch.set_num_threads(system.threads)
    case = build(case_name)
    step = system.prepare(case, Seat(rank, meeting_file))
    memory_before = _memory("VmRSS")

    def timed_step() -> float:
        for parameter in case.model.parameters():
            parameter.grad = None
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    def squared_norm() -> float:
        gradients = (parameter.grad for parameter in case.model.parameters())
        return sum(gradient.double().square().sum().item() for gradient in gradients if gradient is not None)

    return {
        "step": timed_step,
        "norm": squared_norm,
        "memory": lambda: _memory("VmHWM"),
        "memory_before": lambda: memory_before,
    }


def _memory(field: str) -> float:
    """Bytes, from /proc: ru_maxrss would tell the parent's peak too."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024.0
