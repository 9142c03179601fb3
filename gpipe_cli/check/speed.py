"""Whether work that a pipeline runs at the same time does so, and how much faster two partitions are than one device.

On an accelerator the first is a copy beside a computation, on another stream; on a CPU two computations in two threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gpipe_cli.accelerator.devices import available_cores, use_threads
from gpipe_cli.accelerator.streams import SideStream, has_side_streams, median_seconds, record_event
from gpipe_cli.check.row import Machine, Row, Verdict
from gpipe_cli.pipeline.gpipe import GPipe, plain_pipe
from gpipe_cli.pipeline.pipe import Pipe

WIDTHS = (128, 256, 512, 1024, 2048, 4096)
LONG_ENOUGH = 1e-3
"""Seconds of one product of square matrices; starting a kernel takes about 1e-5."""
COPIED = 64 * 2**20
"""Bytes that are copied beside the computation."""
LEAST_OVERLAP = 0.5
"""The share of the shorter work that must be hidden behind the longer."""
CHUNKS = 8
PARTITIONS = 2
LAYERS = 4
IDEAL = PARTITIONS * CHUNKS / (CHUNKS + PARTITIONS - 1)
"""Without costs of copies and of starting kernels; the bubble remains."""
LEAST_SHARE = 0.75
"""The fraction of the ideal speed-up that is expected."""
STEP_TIMEOUT = 60.0


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
    with use_threads(1):
        return judge_threads(*time_two_threads(square_product(torch.device("cpu"))))


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


def check_speed(machine: Machine) -> Iterator[Row]:
    devices = machine.accelerators[:PARTITIONS] or [torch.device("cpu")] * PARTITIONS
    name = "speed-up of two partitions"
    if len(devices) < PARTITIONS:
        yield Row(name, Verdict.SKIPPED, f"needs a second accelerator beside {devices[0]}")
    elif not machine.accelerators and available_cores() < PARTITIONS:
        yield Row(name, Verdict.SKIPPED, "needs a second core")
    else:
        yield judge_speed(name, devices, *time_both(devices))


def time_both(devices: Sequence[torch.device]) -> tuple[float, float]:
    """Seconds of a step on the first device alone, and of the same step in two partitions."""
    # Workers on a CPU have one thread each, so one device stands for one thread.
    with use_threads(1):
        width = suitable_width(devices[0])
        alone = plain_pipe(heavy_model(width).to(devices[0]), chunks=CHUNKS, device=devices[0])
        seconds_alone = _step_seconds(alone, devices[:1], width)
        del alone  # its memory is not needed any more
        with GPipe(
            heavy_model(width),
            [LAYERS // PARTITIONS] * PARTITIONS,
            devices=devices,
            chunks=CHUNKS,
            checkpoint="never",
            schedule="1f1b",
            step_timeout=STEP_TIMEOUT,
        ) as pipe:
            return seconds_alone, _step_seconds(pipe, devices, width)


def _step_seconds(pipe: Pipe, devices: Sequence[torch.device], width: int) -> float:
    # A micro-batch is as large as a layer is wide: then its forward is one of the products that were timed.
    input = torch.ones(CHUNKS * width, width, device=devices[0])
    target = torch.zeros(CHUNKS * width, width, device=devices[-1])

    def step() -> Tensor:
        pipe.zero_grad(set_to_none=True)
        return pipe.step(input, target, mse_loss, key=0)

    return median_seconds(step, devices, repeats=3)


def judge_speed(name: str, devices: Sequence[torch.device], alone: float, pipelined: float) -> Row:
    gain = alone / pipelined
    result = (
        f"{gain:.2f}: a step takes {1e3 * pipelined:.1f} ms on {' and '.join(map(str, devices))}, "
        f"{1e3 * alone:.1f} ms on one; {CHUNKS} micro-batches allow {IDEAL:.2f}"
    )
    figures = {
        "one_device_ms": 1e3 * alone,
        "two_partitions_ms": 1e3 * pipelined,
        "speed_up": gain,
        "ideal": IDEAL,
    }
    if gain >= LEAST_SHARE * IDEAL:
        return Row(name, Verdict.OK, result, figures)
    if devices[0].type == "cpu":
        to_do = "less than two cores can give: end other processes, and compare with the row overlap on cpu"
    else:
        to_do = (
            "less than two devices can give: see the rows on links and overlap, end other processes on the devices; "
            "gpipe profile timeline=true shows where your model loses time"
        )
    return Row(name, Verdict.NOTE, result, figures, to_do)


def suitable_width(device: torch.device) -> int:
    """The smallest width whose product takes long enough, or the largest one."""
    for width in WIDTHS:
        if median_seconds(_product(device, width), [device], repeats=3) >= LONG_ENOUGH:
            break
    return width


def square_product(device: torch.device) -> Callable[[], Tensor]:
    """A function that multiplies two matrices of suitable width."""
    return _product(device, suitable_width(device))


def heavy_model(width: int) -> nn.Sequential:
    """Linear layers of equal cost, so that any equal division is balanced."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def _product(device: torch.device, width: int) -> Callable[[], Tensor]:
    left, right = (torch.ones(width, width, device=device) for _ in range(2))
    return lambda: left @ right
