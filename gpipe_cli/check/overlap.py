"""Whether work that a pipeline runs at the same time does run at the same time.

On an accelerator that is a copy beside a computation, on another stream; on a CPU two computations in two threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from gpipe_cli.accelerator.devices import available_cores
from gpipe_cli.accelerator.streams import SideStream, has_side_streams, record_event
from gpipe_cli.check.row import Machine, Row, Verdict
from gpipe_cli.check.timing import median_seconds
from gpipe_cli.check.workload import square_product

COPIED = 64 * 2**20
"""Bytes that are copied beside the computation."""
LEAST_OVERLAP = 0.5
"""The share of the shorter work that must be hidden behind the longer."""


def check_overlap(machine: Machine) -> Iterator[Row]:
    for device in machine.accelerators:
        if has_side_streams(device):
            yield judge_copies(device, *time_copy_and_compute(device))
        else:
            yield Row(f"overlap on {device}", Verdict.SKIPPED, "torch offers one stream for this device")
    if not machine.accelerators:
        yield _threads_row()


def overlap(first: float, second: float, both: float) -> float:
    """The share of the shorter work that the longer one hides: 1 if all of it, 0 if they run in turn."""
    return max(0.0, min(1.0, (first + second - both) / min(first, second)))


def time_copy_and_compute(device: torch.device) -> tuple[float, float, float]:
    """Seconds of a copy to the host, of a computation, and of both at once."""
    product = square_product(device)
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    destination = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    stream, filled = SideStream(device), record_event(device)

    def copy() -> None:
        with stream.entered(filled):
            destination.copy_(source, non_blocking=True)

    copying, computing = (median_seconds(work, [device]) for work in (copy, product))
    # As long as the copy, so that either can hide the other.
    times = max(1, round(copying / computing))

    def compute() -> None:
        for _ in range(times):
            product()

    def both() -> None:
        copy()
        compute()

    return copying, median_seconds(compute, [device]), median_seconds(both, [device])


def judge_copies(device: torch.device, copying: float, computing: float, both: float) -> Row:
    hidden = overlap(copying, computing, both)
    result = (
        f"copy {1e3 * copying:.1f} ms, computation {1e3 * computing:.1f} ms, both {1e3 * both:.1f} ms: "
        f"{100 * hidden:.0f} % of the shorter is hidden"
    )
    figures = {
        "copy_ms": 1e3 * copying,
        "compute_ms": 1e3 * computing,
        "both_ms": 1e3 * both,
        "hidden": hidden,
    }
    if hidden >= LEAST_OVERLAP:
        return Row(f"overlap on {device}", Verdict.OK, result, figures)
    to_do = (
        "copies and kernels run in turn, so every boundary costs time: unset CUDA_LAUNCH_BLOCKING, end profilers and "
        "other processes on the device, and prefer fewer partitions"
    )
    return Row(f"overlap on {device}", Verdict.NOTE, result, figures, to_do)


def _threads_row() -> Row:
    if available_cores() < 2:
        return Row("overlap on cpu", Verdict.SKIPPED, "one core runs workers in turn")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return judge_threads(*time_two_threads(square_product(torch.device("cpu"))))
    finally:
        torch.set_num_threads(threads)


def time_two_threads(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the work in one thread, and of the same work in two threads at once."""
    # OpenMP keeps the number of threads per thread.
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def run(threads: int) -> None:
            for future in [pool.submit(work) for _ in range(threads)]:
                future.result()

        return median_seconds(partial(run, 1), []), median_seconds(partial(run, 2), [])


def judge_threads(alone: float, both: float) -> Row:
    hidden = overlap(alone, alone, both)
    result = (
        f"one thread {1e3 * alone:.1f} ms, two at once {1e3 * both:.1f} ms: {100 * hidden:.0f} % is hidden"
    )
    figures = {"one_thread_ms": 1e3 * alone, "two_threads_ms": 1e3 * both, "hidden": hidden}
    if hidden >= LEAST_OVERLAP:
        return Row("overlap on cpu", Verdict.OK, result, figures)
    to_do = "two threads do not run at once: end other processes, or give this one two physical cores"
    return Row("overlap on cpu", Verdict.NOTE, result, figures, to_do)
