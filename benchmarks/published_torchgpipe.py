"""torchgpipe's published speed-ups beside the planner's estimate for the same settings, on devices like its Tesla P40.

Batch sizes, chunks, checkpoint modes, balances and numbers of samples are those of torchgpipe's benchmark scripts (its
repository at v0.0.5). Its balances count modules; a partition here ends at the layer whose end is nearest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.published_lines import Line, model_settings, published_lines
from gpipe_cli.models import amoebanetd, resnet, unet
from gpipe_cli.plan.device_table import DEVICES
from gpipe_cli.plan.estimated import DeviceRun, estimate_costs
from gpipe_cli.plan.search import PlanShape
from gpipe_cli.plan.step_time import step_ms
from gpipe_cli.profiling.model_stats import model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.torch_internals.deferred_values import without_values

ROWS = 2
"""Of the micro-batch that is counted."""


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
    samples: int
    """Of an epoch, of which the last mini-batch may be smaller."""
    modules: Sequence[int]
    """How many of torchgpipe's modules each layer has."""
    balances: Mapping[str, Sequence[int]]
    """Of its lines, in modules."""

    def balance(self, line: Line) -> list[int]:
        return layer_balance(self.modules, self.balances[line.name])


def layer_balance(modules: Sequence[int], balance: Sequence[int]) -> list[int]:
    """A balance of torchgpipe's modules in layers: a partition ends at the layer whose end is nearest."""
    ends = list(accumulate(modules))
    cuts = [
        min(range(len(ends)), key=lambda layer: abs(ends[layer] - end)) + 1 for end in accumulate(balance)
    ]
    return [end - begin for begin, end in pairwise([0, *cuts])]


MODELS = (
    Model(
        "ResNet-101",
        "resnet101_speed",
        partial(resnet.build, "resnet101"),
        224,
        functional.cross_entropy,
        samples=50_000,
        modules=[4, *[11] * 33, 3],
        balances={
            "baseline": [370],
            "pipeline-1": [370],
            "pipeline-2": [135, 235],
            "pipeline-4": [44, 92, 124, 110],
            "pipeline-8": [26, 22, 33, 44, 44, 66, 66, 69],
        },
    ),
    Model(
        "U-Net (5, 64)",
        "unet_speed",
        partial(unet.build, num_classes=1, input_shape=(3, 192, 192)),
        192,
        lambda output, target: output.mean(),
        samples=10_000,
        # Five levels of five convolutions and a step down, the bottleneck, the same up, the head.
        modules=[*[4, 4, 4, 4, 4, 2] * 5, *[4] * 5, *[2, 4, 4, 4, 4, 4] * 5, 1],
        balances={
            "baseline": [241],
            "pipeline-1": [241],
            "pipeline-2": [104, 137],
            "pipeline-4": [30, 66, 84, 61],
            "pipeline-8": [16, 27, 31, 44, 22, 57, 27, 17],
        },
    ),
    Model(
        "AmoebaNet-D (18, 256)",
        "amoebanetd_speed",
        partial(amoebanetd.build, input_shape=(3, 224, 224)),
        224,
        functional.cross_entropy,
        samples=10_000,
        modules=[1] * 24,
        balances={
            "n2m1": [7, 17],
            "n2m4": [9, 15],
            "n2m32": [9, 15],
            "n4m1": [3, 4, 5, 12],
            "n4m4": [3, 6, 7, 8],
            "n4m32": [3, 6, 7, 8],
            "n8m1": [2, 2, 2, 2, 2, 3, 4, 7],
            "n8m4": [2, 2, 2, 3, 3, 4, 4, 4],
            "n8m32": [2, 2, 2, 3, 3, 4, 4, 4],
        },
    ),
)


@final
@dataclass(frozen=True)
class Comparison:
    """One published line beside the estimate; speed-ups are multiples of the model's first line."""

    model: str
    line: Line
    published: float
    """Samples per second."""
    estimated: float
    published_speed_up: float
    estimated_speed_up: float

    @property
    def difference(self) -> float:
        """Of the speed-ups, relative."""
        return self.estimated_speed_up / self.published_speed_up - 1


def comparisons() -> Iterator[Comparison]:
    for model in MODELS:
        lines = published_lines(model.recipe)
        published = [float(line.figure.removesuffix("/s")) for line in lines]
        estimated = _samples_per_second(model, lines)
        for line, ours, theirs in zip(lines, estimated, published, strict=True):
            yield Comparison(model.name, line, theirs, ours, theirs / published[0], ours / estimated[0])


def show(console: Console) -> None:
    console.print("torchgpipe's speed-ups on Tesla P40s, with its own balances")
    table = Table("model", "setting", "published/s", "x", "estimated/s", "x", "difference of x", box=None)
    lines = list(comparisons())
    for line in lines:
        table.add_row(
            line.model,
            line.line.name,
            f"{line.published:.1f}",
            f"{line.published_speed_up:.3f}",
            f"{line.estimated:.1f}",
            f"{line.estimated_speed_up:.3f}",
            f"{100 * line.difference:+.0f} %" if line.difference else "",
        )
    console.print(table)
    differences = [abs(line.difference) for line in lines if line.difference]
    console.print(
        f"differences of {len(differences)} speed-ups: median {100 * statistics.median(differences):.1f} %, "
        f"largest {100 * max(differences):.1f} %"
    )


def _samples_per_second(model: Model, lines: Sequence[Line]) -> list[float]:
    """Of each line, over an epoch."""
    with without_values():
        layers = model.build(**model_settings(model.recipe))
    target = torch.zeros(ROWS, dtype=torch.long)
    facts = model_stats(layers, Sample(torch.zeros(ROWS, 3, model.side, model.side), target, model.loss))
    run = DeviceRun(DEVICES["p40"], one_process=True)

    def mini_batch_ms(line: Line, samples: int) -> float:
        spec = PlanShape(line.devices, line.devices, line.chunks, "gpipe", line.checkpoint).spec()
        return step_ms(spec, estimate_costs(facts, run, samples / line.chunks / ROWS), model.balance(line))

    rates = []
    for line in lines:
        whole, rest = divmod(model.samples, line.batch)
        epoch_ms = whole * mini_batch_ms(line, line.batch) + (mini_batch_ms(line, rest) if rest else 0.0)
        rates.append(1000 * model.samples / epoch_ms)
    return rates
