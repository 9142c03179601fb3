"""How much faster two partitions are than one device, against what the schedule allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from gpipe_cli.accelerator.devices import available_cores
from gpipe_cli.check.row import Machine, Row, Verdict
from gpipe_cli.check.timing import median_seconds
from gpipe_cli.check.workload import heavy_model, suitable_width
from gpipe_cli.pipeline.gpipe import GPipe, PlainPipe, ThreadedPipe

CHUNKS = 8
PARTITIONS = 2
LAYERS = 4
IDEAL = PARTITIONS * CHUNKS / (CHUNKS + PARTITIONS - 1)
"""Without costs of copies and of starting kernels; the bubble remains."""
LEAST_SHARE = 0.75
"""Of the ideal speed-up."""
STEP_TIMEOUT = 60.0


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
    threads = torch.get_num_threads()
    # Workers on a CPU have one thread each, so one device stands for one thread.
    torch.set_num_threads(1)
    try:
        width = suitable_width(devices[0])
        alone = PlainPipe(heavy_model(width, LAYERS).to(devices[0]), chunks=CHUNKS, device=devices[0])
        seconds_alone = _step_seconds(alone, devices[:1], width)
        del alone  # its memory is not needed any more
        with GPipe(
            heavy_model(width, LAYERS),
            [LAYERS // PARTITIONS] * PARTITIONS,
            devices=devices,
            chunks=CHUNKS,
            checkpoint="never",
            schedule="1f1b",
            step_timeout=STEP_TIMEOUT,
        ) as pipe:
            return seconds_alone, _step_seconds(pipe, devices, width)
    finally:
        torch.set_num_threads(threads)


def _step_seconds(pipe: ThreadedPipe, devices: Sequence[torch.device], width: int) -> float:
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
