"""Whether a plan's memory is what a process really needs: predicted beside resident, each way in its own process.

    python -m benchmarks.resident

Predicted is what the process had before its first step (libraries, parameters, the mini-batch) and what is counted on
paper: gradients, and the activations that every partition keeps at its worst moment. Measured is the most that was
resident in two steps. Large blocks go back to the system when they are freed, or one would measure malloc's habits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cases import build
from gpipe_cli import GPipe
from gpipe_cli.balance.solver import solve
from gpipe_cli.plan.search_space import PlanShape
from gpipe_cli.profiling.facts import model_facts
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.profiling.partition_memory import activation_bytes

CASES = ("resnet50", "transformer", "unet")
SHAPES = (
    PlanShape(2, 2, 4, "gpipe", "never"),
    PlanShape(2, 2, 8, "1f1b", "never"),
    PlanShape(4, 4, 8, "gpipe", "always"),
)
ERROR_AT_MOST = 0.10
BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resident")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "SHAPE"), help="in this process: a case, a number")
    options = parser.parse_args()
    if options.one is not None:
        sys.stdout.write(json.dumps(_measure(options.one[0], SHAPES[int(options.one[1])])))
        return 0
    table = Table("case", "way", "before", "predicted MiB", "resident MiB", "error", box=None)
    missed = 0
    for case in CASES:
        for number, shape in enumerate(SHAPES):
            before, predicted, resident = (one / MIB for one in _in_a_process(case, number))
            error = predicted / resident - 1
            missed += abs(error) > ERROR_AT_MOST
            way = f"{shape.schedule} {shape.checkpoint}, {shape.partitions} partitions, {shape.chunks} chunks"
            table.add_row(
                case, way, f"{before:.0f}", f"{predicted:.0f}", f"{resident:.0f}", f"{100 * error:+.1f} %"
            )
    console = Console(width=110)
    console.print(table)
    console.print(f"{missed} are more than {100 * ERROR_AT_MOST:.0f} % off")
    return missed


def _in_a_process(case: str, number: int) -> list[int]:
    words = [sys.executable, "-m", "benchmarks.resident", "--one", case, str(number)]
    done = subprocess.run(words, capture_output=True, check=True, text=True, env={**os.environ, **BLOCKS})
    numbers: list[int] = json.loads(done.stdout)
    return numbers


def _measure(name: str, shape: PlanShape) -> list[int]:
    """Bytes: before, predicted, resident."""
    torch.set_num_threads(1)
    case = build(name)
    sizes = [sum(one.numel() for one in layer.parameters()) + 1.0 for layer in case.model]
    balance = solve(sizes, shape.partitions).balance
    rows = [one.tensor_split(shape.chunks)[0] for one in (case.input, case.target)]
    facts = model_facts(case.model, Sample(rows[0], rows[1], case.loss), count_flops=False)
    activations = sum(activation_bytes(facts, balance, shape.spec()))
    gradients = sum(one.nbytes for one in case.model.parameters())
    before = _resident("VmRSS")
    FORGET.write_text("5")  # what was the most so far
    with GPipe(
        case.model,
        balance,
        devices=["cpu"] * shape.partitions,
        chunks=shape.chunks,
        checkpoint=shape.checkpoint,
        schedule=shape.schedule,
    ) as pipe:
        for _ in range(2):
            pipe.step(case.input, case.target, case.loss)
    return [before, before + gradients + activations, _resident("VmHWM")]


def _resident(key: str) -> int:
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return 1024 * int(lines[key].split()[0])


if __name__ == "__main__":
    sys.exit(main())
