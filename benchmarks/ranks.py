"""CPU time of engine=processes over that of bare torch.distributed.pipelining, with engine=threads beside it.

    python -m benchmarks.ranks [--case transformer] [--schedule 1f1b] [--rounds 24]

Two processes hold three systems each: ours, bare torch, and bare torch again. They take turns, in all orders one after
the other, since what runs before a turn is felt in it; a turn is a whole training step with SGD. A figure is the median
over the rounds of the CPU time of both processes over the mean of both bare ones in the same round, with its quartiles.
How the two bare ones differ tells what the machine can tell apart: beyond `NOISE` there is no verdict.
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
from benchmarks.systems import CHUNKS, Seat, Step, meet, torch_step
from benchmarks.turns import prepare
from gpipe_cli.engines import processes, threads
from gpipe_cli.engines.protocol import Engine, EngineSpec, TrainingObjective

CPU = torch.device("cpu")
RATE = 1e-3
BOUND = 1.03
NOISE = 0.01
"""How much the same may differ from the same."""
WARM_UP = 2
OURS, BARE, AGAIN, THREADS = "engine=processes", "bare torch", "bare torch again", "engine=threads"
Seconds = dict[str, list[float]]


def engine_step(engine: Engine, case: Case) -> Step:
    return lambda: engine.train_step((case.input, case.target), key=0, lr=RATE)  # type: ignore[return-value]


def our_engine(case: Case, schedule: str) -> Engine:
    return processes.build(_spec(case, schedule))


def threads_engine(case: Case, schedule: str) -> Engine:
    return threads.build(_spec(case, schedule))


def bare_step(case: Case, seat: Seat, schedule: str) -> Step:
    begin = sum(case.balance[: seat.rank])
    own = case.model[begin : begin + case.balance[seat.rank]]
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
    run = torch_step(case, seat, schedule)

    def step() -> None:
        optimizer.zero_grad()
        run()
        optimizer.step()

    return step


def rank(connection: Connection, seat: Seat, name: str, schedule: str, rounds: int) -> None:
    """One of the two processes; sends the CPU seconds of each turn."""
    from gpipe_cli.distributed import setup_process_groups

    torch.set_num_threads(1)
    meet(seat, 2)
    setup_process_groups([("data", 1), ("pipe", 2)])
    case = build(name)
    steps = {
        BARE: bare_step(build(name), seat, schedule),
        OURS: engine_step(our_engine(case, schedule), case),
        AGAIN: bare_step(build(name), seat, schedule),
    }
    connection.send(turns(steps, rounds))


def turns(steps: Mapping[str, Step], rounds: int) -> Seconds:
    """CPU seconds of this process, all its threads included."""
    orders = list(permutations(steps))
    seconds: Seconds = {name: [] for name in steps}
    for number in range(-WARM_UP, rounds):
        for name in orders[number % len(orders)]:
            begin = time.process_time()
            steps[name]()
            if number >= 0:
                seconds[name].append(time.process_time() - begin)
    return seconds


def of_both_processes(name: str, schedule: str, rounds: int) -> Seconds:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for number in range(2):
            here, there = context.Pipe()
            seat = Seat(number, str(Path(folder) / "meeting"))
            context.Process(target=rank, args=(there, seat, name, schedule, rounds), daemon=True).start()
            there.close()
            ends.append(here)
        first, second = (end.recv() for end in ends)
    return {name: [a + b for a, b in zip(first[name], second[name], strict=True)] for name in first}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    console = Console()
    prepare(console)
    seconds = of_both_processes(options.case, options.schedule, options.rounds)
    case = build(options.case)
    engine = threads_engine(case, options.schedule)
    seconds |= turns({THREADS: engine_step(engine, case)}, options.rounds)
    engine.close()
    table = Table(title=f"{options.case}, {options.schedule}, {options.rounds} rounds")
    for heading in ("system", "x bare torch", "quartiles", "CPU seconds"):
        table.add_column(heading)
    bare = [(one + other) / 2 for one, other in zip(seconds[BARE], seconds[AGAIN], strict=True)]
    ratios = {name: Ratio.of(seconds[name], bare) for name in seconds}
    for name, ratio in ratios.items():
        median = statistics.median(seconds[name])
        table.add_row(name, f"{ratio.median:.3f}", f"{ratio.low:.3f} to {ratio.high:.3f}", f"{median:.3f}")
    console.print(table)
    console.print(
        f"engine=processes takes at most {BOUND} times the CPU time of bare torch: "
        f"{verdict(ratios[OURS].median, Ratio.of(seconds[AGAIN], seconds[BARE]).median)}"
    )


def verdict(ours: float, same: float) -> str:
    if abs(same - 1) > NOISE:
        return f"cannot be told, the same against the same is {same:.3f}"
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
