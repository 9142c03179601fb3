"""The memory of each rank of engine=processes, and how long a run takes to its first step and to save a snapshot.

    python -m benchmarks.rank_memory [--against /path/to/other/checkout] [--rounds 3] [key=value ...]

A new `gpipe train` per round, observed from outside: peaks are VmHWM of the processes, times are those at which the
first row of metrics.jsonl and the manifest of the first snapshot appear. CPU time, of all processes together, depends
less on what else the machine does. Two checkouts take turns; a ratio is the median over the rounds of the time here
divided by the time there. Further words override the keys of the run, or replace them all if they name a model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent.parent
RUN = (
    *(
        "model=mlp",
        "model.width=4096",
        "model.depth=24",
        "data=synthetic",
        "data.shape=[4096]",
        "data.length=128",
    ),
    *("batch_size=64", "chunks=4", "optimizer=sgd", "engine=processes", "partitions=4", "balance=params"),
    *("steps=2", "log.every=1", "snapshot.every=1"),
)
"""24 layers of 4096 x 4096: 1.6 GB in float32."""
POLL = 0.01
GB = 1e9


@final
@dataclass
class Observation:
    peaks: dict[str, int] = field(default_factory=dict)
    """Bytes, by rank; `launcher` is the process that starts them."""
    peaks_at_first_step: dict[str, int] = field(default_factory=dict)
    first_step: float = 0.0
    """Seconds from the start of the command to the row of the first step."""
    saved: float = 0.0
    """Seconds from that row to the first whole snapshot."""
    cpu_until_first_step: float = 0.0
    """Seconds of the launcher and of all ranks."""


def observe(checkout: Path, words: Sequence[str], folder: Path) -> Observation:
    run_dir = folder / "run"
    keys = words if any(word.startswith("model=") for word in words) else [*RUN, *words]
    command = [sys.executable, "-m", "gpipe_cli", "train", f"run_dir={run_dir}", *keys]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    observation, began = Observation(), time.perf_counter()
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=output, stderr=output)
        while process.poll() is None:
            _look(process.pid, run_dir, observation, time.perf_counter() - began)
            time.sleep(POLL)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}: {output.read()}")
    return observation


def _look(launcher: int, run_dir: Path, observation: Observation, now: float) -> None:
    processes = [(launcher, "launcher"), *_ranks(launcher)]
    for process, name in processes:
        observation.peaks[name] = max(observation.peaks.get(name, 0), _peak(process))
    if not observation.first_step and _has_row(run_dir / "metrics.jsonl"):
        observation.first_step, observation.peaks_at_first_step = now, dict(observation.peaks)
        observation.cpu_until_first_step = sum(_cpu_seconds(process) for process, _ in processes)
    is_saving = observation.first_step and not observation.saved
    if is_saving and any(run_dir.glob("snapshots/step-*/manifest.json")):
        observation.saved = now - observation.first_step


def _ranks(launcher: int) -> Iterator[tuple[int, str]]:
    """The ranks below the launcher, which a server forks in their order, or which an older checkout starts itself."""
    for child in _children(launcher):
        environment = _environment(child)
        if b"RANK" in environment:
            yield child, f"rank {environment[b'RANK'].decode()}"
        elif b"WORLD_SIZE" in environment:
            forked = sorted(_children(child))[: int(environment[b"WORLD_SIZE"])]
            yield from ((process, f"rank {rank}") for rank, process in enumerate(forked))
        else:
            yield from _ranks(child)


def _children(process: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))
    except OSError:  # it has ended
        return []


def _environment(process: int) -> dict[bytes, bytes]:
    """The variables that the process was started with; a fork has those of its parent."""
    try:
        entries = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (entry.partition(b"=") for entry in entries)}


def _peak(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _cpu_seconds(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime


def _has_row(metrics: Path) -> bool:
    try:
        lines = metrics.read_text().splitlines()
    except OSError:
        return False
    return any(json.loads(line)["split"] == "train" for line in lines[:1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_memory", description=__doc__)
    parser.add_argument("--against", type=Path, help="the folder of another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    options, words = parser.parse_known_args()
    checkouts = [HERE, *([] if options.against is None else [options.against.resolve()])]
    observations: list[list[Observation]] = [[] for _ in checkouts]
    for _ in range(options.rounds):
        for checkout, observed in zip(checkouts, observations, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                observed.append(observe(checkout, words, Path(folder)))
    console = Console(width=120)
    for checkout, observed in zip(checkouts, observations, strict=True):
        console.print(_peaks_table(str(checkout), observed))
    console.print(_times_table(observations))


def _peaks_table(title: str, observed: Sequence[Observation]) -> Table:
    table = Table("process", "GB until the first step", "GB at most", "GiB", title=title)
    for name in sorted({name for observation in observed for name in observation.peaks}):
        early, late = (
            max(peaks.get(name, 0) for peaks in columns) / GB
            for columns in (
                [observation.peaks_at_first_step for observation in observed],
                [observation.peaks for observation in observed],
            )
        )
        table.add_row(name, f"{early:.2f}", f"{late:.2f}", f"{late * GB / 2**30:.2f}")
    return table


def _times_table(observations: Sequence[Sequence[Observation]]) -> Table:
    table = Table("time", "seconds", "x the other checkout")
    for name in ("first_step", "cpu_until_first_step", "saved"):
        columns = [[getattr(observation, name) for observation in observed] for observed in observations]
        ratio = "-"
        if len(columns) > 1:
            ratio = f"{statistics.median(ours / theirs for ours, theirs in zip(*columns, strict=True)):.2f}"
        table.add_row(name.replace("_", " "), f"{statistics.median(columns[0]):.2f}", ratio)
    return table


if __name__ == "__main__":
    main()
