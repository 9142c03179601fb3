"""Compare writing and reading a snapshot with torch.save and torch.load of the same tensors.

    python -m benchmarks.snapshots [folder]

ResNet-101 with the state of AdamW. Both end with fsync; they take turns, and each figure is the median of
its ratios to torch in the same round. Training waits only for the copy; the rest runs in a thread.

Each read runs in a process of its own, as in a resumed run: in a process that has read before, torch.load reuses memory
that the system has already cleared, and clearing takes most of the time of reading from a warm page cache.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gpipe_cli.engines.state import EngineState, OptimizerState, module_state
from gpipe_cli.runs.snapshots.contents import copy_state, open_snapshot, write_snapshot
from gpipe_cli.runs.snapshots.manifest import read_snapshot
from gpipe_cli.runs.snapshots.record import TrainingRecord, versions
from gpipe_cli.training.loop import Position
from gpipe_cli.vision import torchvision

ROUNDS = 7
BOUND = 1.3


def state_of_training() -> EngineState:
    model = torchvision.models.resnet101()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors, numbers = OptimizerState(optimizer, names, torch.optim.AdamW).take()
    return EngineState(module_state(model).model, {}, tensors, {"optimizer": numbers, "scaler": {}})


def save_with_torch(state: EngineState, path: Path) -> None:
    with path.open("wb") as file:
        torch.save({"model": state.model, "optimizer": state.optimizer}, file)
        file.flush()
        os.fsync(file.fileno())


def save_snapshot(state: EngineState, spare: EngineState, path: Path) -> None:
    record = TrainingRecord(Position(1, 1.0), None, 1, 0, 1, versions(), state.numbers)
    write_snapshot(path, copy_state(state, spare), record, lambda: None)


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def seconds_in_new_process(what: str, path: Path) -> float:
    """Seconds of reading in a new process, without its start-up."""
    command = [sys.executable, "-m", "benchmarks.snapshots", what, str(path)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    torch.set_num_threads(1)  # as in a run whose partitions share the CPU
    if sys.argv[1:2] and (read := READERS.get(sys.argv[1])):
        sys.stdout.write(f"{seconds(lambda: read(Path(sys.argv[2])))}\n")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="gpipe-snapshots-", dir=sys.argv[1] if len(sys.argv) > 1 else None))
    try:
        figures = measure(state_of_training(), folder)
    finally:
        shutil.rmtree(folder)
    table = Table("operation", "median seconds", "x torch", "at most", box=None)
    missed = 0
    for name, (times, base) in figures.items():
        ratio = statistics.median(time / base_time for time, base_time in zip(times, base, strict=True))
        bounded = not name.startswith(("torch", "copy"))
        missed += bounded and ratio > BOUND
        row = (f"{statistics.median(times):.3f}", f"{ratio:.2f}", f"{BOUND:.2f}" if bounded else "-")
        table.add_row(name, *row)
    Console().print(table)
    return missed


def measure(state: EngineState, folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    times: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(seconds(work))

    def note_reading(name: str, path: Path) -> None:
        times.setdefault(name, []).append(seconds_in_new_process(name, path))

    spare = copy_state(state)  # in a run, every save but the first reuses the memory of the previous one
    for turn in range(ROUNDS):
        file, directory = folder / f"{turn}.pt", folder / f"step-{turn:08d}"
        note("torch.save + fsync", lambda file=file: save_with_torch(state, file))
        note("snapshot", lambda directory=directory: save_snapshot(state, spare, directory))
        note("copy (training waits)", lambda: copy_state(state, spare))
        note_reading("torch.load", file)
        note_reading("read and verify", directory)
        file.unlink()
        shutil.rmtree(directory)
    saving = ("torch.save + fsync", "snapshot", "copy (training waits)")
    bases = {name: times["torch.save + fsync" if name in saving else "torch.load"] for name in times}
    return {name: (seconds_of_rounds, bases[name]) for name, seconds_of_rounds in times.items()}


def load_with_torch(path: Path) -> dict[str, dict[str, Tensor]]:
    content: dict[str, dict[str, Tensor]] = torch.load(path, weights_only=True)
    return content


READERS: dict[str, Callable[[Path], object]] = {
    "torch.load": load_with_torch,
    "read and verify": lambda path: open_snapshot(read_snapshot(path)),
}


if __name__ == "__main__":
    sys.exit(main())
