"""Whether a pipeline over the devices gives bitwise the results of one device in every schedule and mode.

Devices of one kind run the same kernels, so with deterministic algorithms every bit must agree. The kernels of an
accelerator and of the CPU round differently: they must agree within a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpipe_cli.accelerator.determinism import deterministic_algorithms
from gpipe_cli.accelerator.devices import device_name
from gpipe_cli.check.row import Machine, Row, Verdict
from gpipe_cli.pipeline.gpipe import GPipe, plain_pipe
from gpipe_cli.pipeline.partitioning import move_to_devices
from gpipe_cli.pipeline.pipe import Pipe
from gpipe_cli.schedule import ScheduleModule, names, traits
from gpipe_cli.schedule.action import MODES
from gpipe_cli.schedule.files import FixedOrder
from gpipe_cli.schedule.orders import AUTO, zero_bubble_v

CHUNKS, SAMPLES = 4, 16
KEY = 1
DROPOUT = 0.1
WIDTH, SIZE, CLASSES = 16, 8, 10
"""The width of the tokens, the size of the images, and the number of classes."""
STEP_TIMEOUT = 60.0
"""Seconds; a step takes milliseconds, but the first on a device loads its kernels."""
TOLERANCE = 1e-3
"""The largest difference from the CPU that rounding explains, relative to the largest value of a tensor."""
CPU = torch.device("cpu")

Results = Mapping[str, Tensor]
"""The loss, every gradient and every buffer after one step, on the CPU."""


@final
@dataclass(frozen=True)
class Difference:
    tensor: str
    relative: float
    """The largest difference, relative to the largest expected value; infinite if it cannot be told."""

    def __str__(self) -> str:
        if math.isinf(self.relative):
            return f"{self.tensor}, which is missing or not finite"
        return f"{self.tensor} by {self.relative:.1e} of its largest value"


def check_bits(machine: Machine) -> Iterator[Row]:
    # Enough layers for two partitions per worker.
    first, blocks = machine.workers[0], 2 * len(machine.workers)
    with deterministic_algorithms(enabled=True):
        alone = run_alone(first, small_model(blocks, dropout=DROPOUT))
        schedules: list[str | ScheduleModule] = [*names(), _there_and_back(len(machine.workers))]
        for schedule in schedules:
            differing = {
                mode: found
                for mode in MODES
                if (found := differences(alone, _run_pipelined(machine.workers, blocks, schedule, mode)))
            }
            yield judge_schedule(machine, traits(schedule).name, alone, differing)
        if machine.accelerators:
            here, there = (run_alone(device, small_model(blocks, dropout=0.0)) for device in (first, CPU))
            yield judge_against_cpu(first, differences(there, here))


def run_alone(device: torch.device, model: nn.Sequential) -> Results:
    """One step without a pipeline."""
    move_to_devices([model], [device])
    return _step(plain_pipe(model, chunks=CHUNKS, device=device))


def _there_and_back(workers: int) -> FixedOrder:
    """An order as schedule=auto may find it: the first device has the first and the last partition."""
    return FixedOrder(AUTO, zero_bubble_v(2 * workers, CHUNKS, workers))


def _run_pipelined(
    workers: Sequence[torch.device], blocks: int, schedule: str | ScheduleModule, checkpoint: str
) -> Results:
    partitions = (2 if traits(schedule).several_per_device else 1) * len(workers)
    model = small_model(blocks, dropout=DROPOUT)
    layers, larger = divmod(len(model), partitions)
    with GPipe(
        model,
        [layers + (partition < larger) for partition in range(partitions)],
        devices=workers,
        chunks=CHUNKS,
        checkpoint=checkpoint,
        schedule=schedule,
        step_timeout=STEP_TIMEOUT,
    ) as pipe:
        return _step(pipe)


def _step(pipe: Pipe) -> Results:
    images, classes = small_batch(SAMPLES)
    loss = pipe.step(images.to(pipe.input_device), classes.to(pipe.output_device), cross_entropy, key=KEY)
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in pipe.named_parameters()}
    buffers = {f"buffer {name}": buffer for name, buffer in pipe.named_buffers()}
    results = {"loss": loss, **gradients, **buffers}
    return {name: tensor.detach().to(CPU) for name, tensor in results.items() if tensor is not None}


def differences(expected: Results, results: Results) -> list[Difference]:
    """The tensors that differ in any bit."""
    return [
        *(Difference(name, math.inf) for name in sorted(expected.keys() ^ results.keys())),
        *(
            Difference(name, _relative_difference(expected[name], results[name]))
            for name in expected
            if name in results and not torch.equal(expected[name], results[name])
        ),
    ]


def _relative_difference(expected: Tensor, result: Tensor) -> float:
    largest = float((expected.double() - result.double()).abs().max())
    scale = float(expected.double().abs().max())
    return largest / scale if scale and math.isfinite(largest) else math.inf


def judge_schedule(
    machine: Machine, schedule: str, expected: Results, differing: Mapping[str, Sequence[Difference]]
) -> Row:
    """differing: what differs, by checkpoint mode; a mode without a difference is missing."""
    name, first = f"bits of schedule={schedule}", machine.workers[0]
    figures = {
        "tensors": len(expected),
        "differing": {
            mode: {each.tensor: _finite(each.relative) for each in found} for mode, found in differing.items()
        },
    }
    if not differing:
        result = f"loss, gradients and buffers equal to {first} alone in checkpoint={', '.join(MODES)}"
        return Row(name, Verdict.OK, result, figures)
    mode, found = next(iter(differing.items()))
    result = f"checkpoint={', '.join(differing)}: {len(found)} of {len(expected)} tensors differ from {first}"
    result += f", the first {found[0]} (checkpoint={mode})"
    kinds = {device_name(device) for device in machine.devices}
    if len(kinds) > 1:
        to_do = f"{' and '.join(sorted(kinds))} round differently; name devices of one kind"
        return Row(name, Verdict.NOTE, result, figures, to_do)
    to_do = (
        "the pipeline changes results on this machine: open an issue with this output and that of gpipe env"
    )
    return Row(name, Verdict.PROBLEM, result, figures, to_do)


def judge_against_cpu(device: torch.device, differing: Sequence[Difference]) -> Row:
    name = f"{device} and the CPU"
    largest = max(differing, key=lambda difference: difference.relative, default=None)
    if largest is None:
        return Row(name, Verdict.OK, "bitwise identical", {"largest": 0.0, "tensor": None})
    figures = {"largest": _finite(largest.relative), "tensor": largest.tensor}
    if largest.relative <= TOLERANCE:
        result = f"equal but for rounding; the most differs {largest}"
        return Row(name, Verdict.OK, result, figures)
    to_do = (
        "more than rounding explains: check that the build of torch supports this device (gpipe env), and run the "
        "vendor's memory test"
    )
    return Row(name, Verdict.PROBLEM, f"differ: {largest}", figures, to_do)


def _finite(number: float) -> float | None:
    """JSON has no infinity."""
    return number if math.isfinite(number) else None


def small_model(blocks: int, *, dropout: float) -> nn.Sequential:
    """Convolution, norms, dropout, attention and linear layers, two of them tied: 8 layers and the blocks.

    The values of its parameters are always the same.
    """
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    # In the first and in a last partition, as the embedding of a language model.
    second.weight = first.weight
    layers: list[nn.Module] = [
        nn.Conv2d(3, WIDTH, 3, padding=1, bias=False),  # batch norm takes the mean out: no gradient but noise
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(inplace=True),
        _Tokens(),
        first,
        *(
            nn.TransformerEncoderLayer(
                WIDTH, 2, 4 * WIDTH, dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        ),
        _Mean(),
        second,
        nn.Linear(WIDTH, CLASSES),
    ]
    model = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def small_batch(samples: int) -> tuple[Tensor, Tensor]:
    """Images and their classes, always the same."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 3, SIZE, SIZE, generator=generator)
    return images, torch.randint(CLASSES, (samples,), generator=generator)


class _Tokens(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image.flatten(2).transpose(1, 2)


class _Mean(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(dim=1)
