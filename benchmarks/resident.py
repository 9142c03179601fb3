"""Compare the memory that a plan predicts with the resident memory, each configuration in its own process.

    python -m benchmarks.resident

Predicted memory is what the process has before its first step (libraries, parameters, the mini-batch) plus the computed
size of gradients and of each partition's activations at their peak. Measured memory is the resident peak of two steps.
Large blocks return to the system when they are freed; otherwise this would measure malloc's caching.
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
from gpipe_cli.plan.search import PlanShape
from gpipe_cli.profiling.memory import activation_bytes
from gpipe_cli.profiling.model_stats import model_stats
from gpipe_cli.profiling.records import Sample

CASES = ("resnet50", "transformer", "unet")
SHAPES = (
    PlanShape(2, 2, 4, "gpipe", "never"),
    PlanShape(2, 2, 8, "1f1b", "never"),
    PlanShape(4, 4, 8, "gpipe", "always"),
)
ERROR_AT_MOST = 0.10
BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resident")
    parser.add_argument(
        "--measure",
        nargs=2,
        metavar=("CASE", "SHAPE"),
        help="measure this case and shape (a number) in this process",
    )
    options = parser.parse_args()
    if options.measure is not None:
        sys.stdout.write(json.dumps(_measure(options.measure[0], SHAPES[int(options.measure[1])])))
        return 0
    table = Table("case", "configuration", "before", "predicted MiB", "resident MiB", "error", box=None)
    missed = 0
    for case in CASES:
        for number, shape in enumerate(SHAPES):
            before, predicted, resident = (size / MIB for size in _measure_in_subprocess(case, number))
            error = predicted / resident - 1
            missed += abs(error) > ERROR_AT_MOST
            config = (
                f"{shape.schedule} {shape.checkpoint}, {shape.partitions} partitions, {shape.chunks} chunks"
            )
            table.add_row(
                case, config, f"{before:.0f}", f"{predicted:.0f}", f"{resident:.0f}", f"{100 * error:+.1f} %"
            )
    console = Console(width=110)
    console.print(table)
    console.print(f"{missed} are more than {100 * ERROR_AT_MOST:.0f} % off")
    return missed


def _measure_in_subprocess(case: str, number: int) -> list[int]:
    words = [sys.executable, "-m", "benchmarks.resident", "--measure", case, str(number)]
    done = subprocess.run(words, capture_output=True, check=True, text=True, env={**os.environ, **BLOCKS})
    numbers: list[int] = json.loads(done.stdout)
    return numbers


def _measure(name: str, shape: PlanShape) -> list[int]:
    """Bytes: before, predicted, resident."""
    torch.set_num_threads(1)
    case = build(name)
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) + 1.0 for layer in case.model]
    balance = solve(sizes, shape.partitions).balance
    rows = [tensor.tensor_split(shape.chunks)[0] for tensor in (case.input, case.target)]
    facts = model_stats(case.model, Sample(rows[0], rows[1], case.loss), count_flops=False)
    activations = sum(activation_bytes(facts, balance, shape.spec()))
    gradients = sum(parameter.nbytes for parameter in case.model.parameters())
    before = _resident("VmRSS")
    CLEAR_REFS.write_text("5")  # resets the peak, VmHWM
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
