"""Measure how much of the time to sum gradients over replicas backward hides.

    python -m benchmarks.overlap [--layers 16] [--width 1024] [--rows 256] [--partitions 1] [--rounds 12]

Two replicas of an MLP train with engine=processes. In each round they make one step with each of three ways to sum
gradients, in all orders: in buckets while backward still runs, in the same buckets after backward, and not at all. The
exposed time of a way is the time of its step above that of the step without sums. Over loopback the sums compete with
backward for the same cores; to measure a network instead, limit the loopback device of a network namespace:

    unshare -n sh -c 'ip link set lo up && tc qdisc add dev lo root tbf rate 2gbit burst 1mb latency 50ms &&
        python -m benchmarks.overlap'
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import permutations
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.harness import Ratio
from benchmarks.systems import Rendezvous, join_process_group
from gpipe_cli.distributed import setup_process_groups
from gpipe_cli.distributed.gradient_buckets import GradientBuckets
from gpipe_cli.engines import processes
from gpipe_cli.engines.protocol import Engine, EngineSpec, TrainingObjective

REPLICAS = 2
WARM_UP = 2
DURING, AFTER, NONE = "during backward", "after backward", "no sums"
WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    DURING: nullcontext,
    # Without a last backward, no bucket starts before `finish`.
    AFTER: lambda: patch.object(GradientBuckets, "last_backward", lambda buckets: nullcontext()),
    NONE: lambda: patch.multiple(
        GradientBuckets, last_backward=lambda buckets: nullcontext(), finish=lambda buckets: None
    ),
}
Seconds = dict[str, list[float]]


def build(options: argparse.Namespace) -> Engine:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(options.width, options.width), nn.ReLU()) for _ in range(options.layers)
    ]
    balance = [options.layers // options.partitions] * options.partitions
    balance[-1] += options.layers - sum(balance)
    return processes.build(
        EngineSpec(
            nn.Sequential(*layers),
            TrainingObjective(
                nn.functional.mse_loss, lambda output, target: {}, partial(torch.optim.SGD, lr=1e-3)
            ),
            balance,
            [torch.device("cpu")] * options.partitions,
            chunks=options.chunks,
            eval_chunks=options.chunks,
            schedule=options.schedule,
            checkpoint="never",
        )
    )


def rank(connection: Connection, rendezvous: Rendezvous, options: argparse.Namespace) -> None:
    """Run one of the processes and send the seconds of each step."""
    torch.set_num_threads(1)
    join_process_group(rendezvous, REPLICAS * options.partitions)
    setup_process_groups([("data", REPLICAS), ("pipe", options.partitions)])
    engine = build(options)
    batch = torch.randn(options.rows, options.width), torch.randn(options.rows, options.width)
    orders = list(permutations(WAYS))
    seconds: Seconds = {name: [] for name in WAYS}
    for number in range(-WARM_UP, options.rounds):
        for name in orders[number % len(orders)]:
            torch.distributed.barrier()
            begin = time.perf_counter()
            with WAYS[name]():
                engine.train_step(batch, key=0, lr=1e-3)
            if number >= 0:
                seconds[name].append(time.perf_counter() - begin)
    connection.send(seconds)


def measure(options: argparse.Namespace) -> Seconds:
    """The seconds of each step, those of the slowest process."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for number in range(REPLICAS * options.partitions):
            parent_end, child_end = context.Pipe()
            rendezvous = Rendezvous(number, str(Path(folder) / "rendezvous"))
            context.Process(target=rank, args=(child_end, rendezvous, options), daemon=True).start()
            child_end.close()
            ends.append(parent_end)
        of_ranks: list[Seconds] = [end.recv() for end in ends]
    return {
        name: [max(turn) for turn in zip(*(seconds[name] for seconds in of_ranks), strict=True)]
        for name in WAYS
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    seconds = measure(options)
    megabytes = options.layers * (options.width + 1) * options.width * 4 / 1e6
    title = f"{megabytes:.0f} MB of gradients, {options.partitions} partitions, {options.schedule}"
    table = Table(title=f"{title}, {options.rows} rows, {options.rounds} rounds")
    for heading in ("gradients are summed", "x after backward", "quartiles", "seconds", "exposed seconds"):
        table.add_column(heading)
    exposed = {
        name: statistics.median(
            each - without for each, without in zip(seconds[name], seconds[NONE], strict=True)
        )
        for name in WAYS
    }
    for name in WAYS:
        ratio = Ratio.of(seconds[name], seconds[AFTER])
        table.add_row(
            name,
            f"{ratio.median:.3f}",
            f"{ratio.low:.3f} to {ratio.high:.3f}",
            f"{statistics.median(seconds[name]):.3f}",
            f"{exposed[name]:.3f}",
        )
    console = Console()
    console.print(table)
    console.print(f"hidden by backward: {1 - exposed[DURING] / exposed[AFTER]:.0%} of the time of the sums")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=12)
    return parser


if __name__ == "__main__":
    main()
