"""torchgpipe's published speed-ups beside the planner's estimate for the same settings, on devices like its Tesla P40.

    python -m benchmarks.published

Nothing is run: operations and bytes are counted with fake tensors, and a roofline makes times of them. Micro-batches,
chunks and checkpoint modes are those of torchgpipe's benchmark scripts (its repository at v0.0.5); layers are cut
where this package cuts them, and balances are the best for the estimate, since its own cut is finer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli.models import amoebanetd, resnet, unet
from gpipe_cli.plan.balances import best_balance, lowest
from gpipe_cli.plan.devices import DEVICES
from gpipe_cli.plan.roofline import estimate
from gpipe_cli.plan.shape import Shape
from gpipe_cli.profiling.facts import model_facts
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.profiling.without_storage import without_storage

ROWS = 2
"""Of the micro-batch that is counted."""
ACTIONS = 20_000
"""Simulated to find a balance."""


@final
@dataclass(frozen=True)
class Published:
    """One line of the tables in torchgpipe's docs/benchmarks.rst."""

    name: str
    devices: int
    batch: int
    chunks: int
    checkpoint: str
    samples_per_second: float


@final
@dataclass(frozen=True)
class Model:
    name: str
    build: Callable[[], nn.Sequential]
    side: int
    loss: Callable[[Tensor, Tensor], Tensor]
    lines: Sequence[Published]
    """The first is what the others are compared with."""


MODELS = (
    Model(
        "ResNet-101",
        lambda: resnet.build("resnet101", num_classes=1000),
        224,
        functional.cross_entropy,
        (
            Published("baseline", 1, 118, 1, "never", 95.862),
            Published("pipeline-1", 1, 220, 2, "except_last", 81.796),
            Published("pipeline-2", 2, 25000, 1667, "except_last", 135.539),
            Published("pipeline-4", 4, 5632, 256, "except_last", 265.958),
            Published("pipeline-8", 8, 5400, 150, "except_last", 411.662),
        ),
    ),
    Model(
        "U-Net (5, 64)",
        lambda: unet.build(5, 5, 64, num_classes=1, input_shape=(3, 192, 192)),
        192,
        lambda output, target: output.mean(),
        (
            Published("baseline", 1, 40, 1, "never", 28.500),
            Published("pipeline-1", 1, 80, 2, "except_last", 24.456),
            Published("pipeline-2", 2, 512, 32, "except_last", 35.502),
            Published("pipeline-4", 4, 512, 16, "except_last", 67.042),
            Published("pipeline-8", 8, 640, 40, "except_last", 88.497),
        ),
    ),
    Model(
        "AmoebaNet-D (18, 256)",
        lambda: amoebanetd.build(1000, 18, 256, input_shape=(3, 224, 224)),
        224,
        functional.cross_entropy,
        (
            Published("n=2, m=1", 2, 96, 1, "always", 26.733),
            Published("n=2, m=4", 2, 256, 4, "except_last", 41.133),
            Published("n=2, m=32", 2, 1280, 32, "except_last", 47.386),
            Published("n=4, m=1", 4, 160, 1, "always", 26.827),
            Published("n=4, m=4", 4, 360, 4, "except_last", 44.543),
            Published("n=4, m=32", 4, 1152, 32, "except_last", 72.412),
            Published("n=8, m=1", 8, 196, 1, "always", 24.918),
            Published("n=8, m=4", 8, 480, 4, "except_last", 70.065),
            Published("n=8, m=32", 8, 1280, 32, "except_last", 132.413),
        ),
    ),
)


def main() -> None:
    table = Table("model", "setting", "published/s", "x", "estimated/s", "x", "difference of x", box=None)
    differences = []
    for model in MODELS:
        rates = _estimates(model)
        for line, rate in zip(model.lines, rates, strict=True):
            published = line.samples_per_second / model.lines[0].samples_per_second
            estimated = rate / rates[0]
            if line is not model.lines[0]:
                differences.append(abs(estimated / published - 1))
            table.add_row(
                model.name,
                line.name,
                f"{line.samples_per_second:.1f}",
                f"{published:.3f}",
                f"{rate:.1f}",
                f"{estimated:.3f}",
                f"{100 * (estimated / published - 1):+.0f} %",
            )
    console = Console(width=110)
    console.print(table)
    console.print(
        f"differences of {len(differences)} speed-ups: median {100 * statistics.median(differences):.0f} %, "
        f"largest {100 * max(differences):.0f} %"
    )


def _estimates(model: Model) -> list[float]:
    """Samples per second of each line."""
    with without_storage():
        layers = model.build()
    target = torch.zeros(ROWS, dtype=torch.long)
    facts = model_facts(layers, Sample(torch.zeros(ROWS, 3, model.side, model.side), target, model.loss))
    found = []
    for line in model.lines:
        costs = estimate(list(layers), facts, DEVICES["p40"], line.batch / line.chunks / ROWS)
        shape = Shape(line.devices, line.devices, line.chunks, "gpipe", line.checkpoint)
        course = shape.course()
        start = lowest(costs, course, None)
        assert start is not None, "without a limit every model fits"
        found.append(1000 * line.batch / best_balance(costs, course, None, start, ACTIONS).step_ms)
    return found


if __name__ == "__main__":
    main()
