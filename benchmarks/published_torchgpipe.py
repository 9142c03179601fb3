"""torchgpipe's published speed-ups beside the planner's estimate for the same settings, on devices like its Tesla P40.

Micro-batches, chunks and checkpoint modes are those of torchgpipe's benchmark scripts (its repository at v0.0.5);
layers are cut where this package cuts them, and balances are the best for the estimate, since its own cut is finer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.published_lines import Line, model_settings, published_lines
from gpipe_cli.models import amoebanetd, resnet, unet
from gpipe_cli.plan.bound import MemoryFit
from gpipe_cli.plan.costs import LayerCosts
from gpipe_cli.plan.device_costs import DeviceRun, estimate_costs
from gpipe_cli.plan.devices import DEVICES
from gpipe_cli.plan.search import best_balance, lowest_bound
from gpipe_cli.plan.search_space import PlanShape
from gpipe_cli.profiling.facts import model_facts
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.sequential.without_storage import without_storage

ROWS = 2
"""Of the micro-batch that is counted."""
ACTIONS = 20_000
"""Simulated to find a balance."""


@final
@dataclass(frozen=True)
class Model:
    name: str
    recipe: str
    """Which says what was published of it; the first line is what the others are compared with."""
    build: Callable[..., nn.Sequential]
    """From the recipe's settings."""
    side: int
    loss: Callable[[Tensor, Tensor], Tensor]


MODELS = (
    Model("ResNet-101", "resnet101_speed", partial(resnet.build, "resnet101"), 224, functional.cross_entropy),
    Model(
        "U-Net (5, 64)",
        "unet_speed",
        partial(unet.build, num_classes=1, input_shape=(3, 192, 192)),
        192,
        lambda output, target: output.mean(),
    ),
    Model(
        "AmoebaNet-D (18, 256)",
        "amoebanetd_speed",
        partial(amoebanetd.build, input_shape=(3, 224, 224)),
        224,
        functional.cross_entropy,
    ),
)


def show(console: Console) -> None:
    table = Table("model", "setting", "published/s", "x", "estimated/s", "x", "difference of x", box=None)
    differences = []
    for model in MODELS:
        lines = published_lines(model.recipe)
        rates = _estimates(model, lines)
        for line, rate in zip(lines, rates, strict=True):
            published = _samples_per_second(line) / _samples_per_second(lines[0])
            estimated = rate / rates[0]
            if line is not lines[0]:
                differences.append(abs(estimated / published - 1))
            table.add_row(
                model.name,
                line.name,
                f"{_samples_per_second(line):.1f}",
                f"{published:.3f}",
                f"{rate:.1f}",
                f"{estimated:.3f}",
                f"{100 * (estimated / published - 1):+.0f} %",
            )
    console.print(table)
    console.print(
        f"differences of {len(differences)} speed-ups: median {100 * statistics.median(differences):.0f} %, "
        f"largest {100 * max(differences):.0f} %"
    )


def _samples_per_second(line: Line) -> float:
    return float(line.figure.removesuffix("/s"))


def _estimates(model: Model, lines: Sequence[Line]) -> list[float]:
    """Samples per second of each line."""
    with without_storage():
        layers = model.build(**model_settings(model.recipe))
    target = torch.zeros(ROWS, dtype=torch.long)
    facts = model_facts(layers, Sample(torch.zeros(ROWS, 3, model.side, model.side), target, model.loss))
    samples_per_second = []
    for line in lines:
        costs = estimate_costs(
            facts, DeviceRun(DEVICES["p40"], one_process=True), line.batch / line.chunks / ROWS
        )
        step_ms = best_step_ms(costs, line.devices, line.chunks, line.checkpoint)
        samples_per_second.append(1000 * line.batch / step_ms)
    return samples_per_second


def best_step_ms(costs: LayerCosts, devices: int, chunks: int, checkpoint: str) -> float:
    """Of the best balance, under the gpipe schedule."""
    spec = PlanShape(devices, devices, chunks, "gpipe", checkpoint).spec()
    fit = MemoryFit({checkpoint: None})
    start = lowest_bound(costs, spec, fit)
    assert start is not None, "without a limit every model fits"
    return best_balance(costs, spec, fit, start, ACTIONS).step_ms
