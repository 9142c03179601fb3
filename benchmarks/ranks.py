"""Compare the CPU time of engine=processes with bare torch.distributed.pipelining; engine=threads is shown too.

    python -m benchmarks.ranks [--case transformer] [--schedule 1f1b] [--rounds 24]

Two processes hold three systems each: ours, bare torch, and bare torch again. They take turns in all orders, because
what runs before a turn affects it; a turn is a training step with SGD. A figure is the median, with quartiles, over all
rounds of the CPU time of both processes divided by the mean of both bare systems in the same round. The difference
between the two bare systems is the measurement's noise: above `NOISE` there is no verdict.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import permutations
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES, Case, build
from benchmarks.harness import Ratio
from benchmarks.systems import CHUNKS, Rendezvous, Step, join_process_group, torch_step
from benchmarks.turns import prepare
from gpipe_cli.engines import processes, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec, TrainingObjective

CPU = torch.device("cpu")
RATE = 1e-3
BOUND = 1.03
NOISE = 0.01
"""The largest tolerated difference between two measurements of the same system."""
WARM_UP = 2
OURS, BARE, BARE_AGAIN, THREADS = "engine=processes", "bare torch", "bare torch again", "engine=threads"
Seconds = dict[str, list[float]]


def engine_step(engine: Engine, case: Case) -> Step:
    return lambda: engine.train_step((case.input, case.target), key=0, lr=RATE)  # type: ignore[return-value]


def our_engine(case: Case, schedule: str) -> Engine:
    return processes.build(_spec(case, schedule))


def threads_engine(case: Case, schedule: str) -> Engine:
    return threads.build(_spec(case, schedule))


def bare_step(case: Case, rendezvous: Rendezvous, schedule: str) -> Step:
    begin = sum(case.balance[: rendezvous.rank])
    own = case.model[begin : begin + case.balance[rendezvous.rank]]
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
    run = torch_step(case, rendezvous, schedule)

    def step() -> None:
        optimizer.zero_grad()
        run()
        optimizer.step()

    return step


def rank(connection: Connection, rendezvous: Rendezvous, name: str, schedule: str, rounds: int) -> None:
    """Run one of the two processes and send the CPU seconds of each turn."""
    from gpipe_cli.distributed import setup_process_groups

    torch.set_num_threads(1)
    join_process_group(rendezvous, 2)
    setup_process_groups([("data", 1), ("pipe", 2)])
    case = build(name)
    steps = {
        BARE: bare_step(build(name), rendezvous, schedule),
        OURS: engine_step(our_engine(case, schedule), case),
        BARE_AGAIN: bare_step(build(name), rendezvous, schedule),
    }
    connection.send(take_turns(steps, rounds))


def take_turns(steps: Mapping[str, Step], rounds: int) -> Seconds:
    """CPU seconds of each turn, including all threads of this process."""
    orders = list(permutations(steps))
    seconds: Seconds = {name: [] for name in steps}
    for number in range(-WARM_UP, rounds):
        for name in orders[number % len(orders)]:
            begin = time.process_time()
            steps[name]()
            if number >= 0:
                seconds[name].append(time.process_time() - begin)
    return seconds


def measure_both_ranks(name: str, schedule: str, rounds: int) -> Seconds:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        parent_ends = []
        for number in range(2):
            parent_end, child_end = context.Pipe()
            rendezvous = Rendezvous(number, str(Path(folder) / "rendezvous"))
            context.Process(
                target=rank, args=(child_end, rendezvous, name, schedule, rounds), daemon=True
            ).start()
            child_end.close()
            parent_ends.append(parent_end)
        first, second = (end.recv() for end in parent_ends)
    return {name: [a + b for a, b in zip(first[name], second[name], strict=True)] for name in first}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    console = Console()
    prepare(console)
    seconds = measure_both_ranks(options.case, options.schedule, options.rounds)
    case = build(options.case)
    engine = threads_engine(case, options.schedule)
    seconds |= take_turns({THREADS: engine_step(engine, case)}, options.rounds)
    engine.close()
    table = Table(title=f"{options.case}, {options.schedule}, {options.rounds} rounds")
    for heading in ("system", "x bare torch", "quartiles", "CPU seconds"):
        table.add_column(heading)
    bare = [(first + second) / 2 for first, second in zip(seconds[BARE], seconds[BARE_AGAIN], strict=True)]
    ratios = {name: Ratio.of(seconds[name], bare) for name in seconds}
    for name, ratio in ratios.items():
        median = statistics.median(seconds[name])
        table.add_row(name, f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}", f"{median:.3f}")
    console.print(table)
    console.print(
        f"engine=processes takes at most {BOUND} times the CPU time of bare torch: "
        f"{verdict(ratios[OURS].median, Ratio.of(seconds[BARE_AGAIN], seconds[BARE]).median)}"
    )


def verdict(ours: float, same: float) -> str:
    if abs(same - 1) > NOISE:
        return f"unknown: bare torch differs from itself by a factor of {same:.3f}"
    return "holds" if ours <= BOUND else "is missed"


def _objective(case: Case) -> TrainingObjective:
    return TrainingObjective(case.loss, lambda output, target: {}, partial(torch.optim.SGD, lr=RATE))


def _spec(case: Case, schedule: str) -> EngineSpec:
    return EngineSpec(
        case.model,
        _objective(case),
        list(case.balance),
        [CPU, CPU],
        chunks=CHUNKS,
        eval_chunks=CHUNKS,
        checkpoint="never",
        schedule=schedule,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--case", choices=CASES, default="transformer")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b"), default="1f1b")
    parser.add_argument("--rounds", type=int, default=24)
    return parser


if __name__ == "__main__":
    main()
