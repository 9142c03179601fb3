"""torchgpipe's published peaks of memory beside the planner's estimate for the same settings.

Balances, batch sizes and optimizers are those of torchgpipe's scripts (its repository at v0.0.5); every micro-batch has
one row and is recomputed, except in the baseline. The published peak is what torch's allocator reserved on all devices
together, with fragments and cuDNN's workspaces; the estimate counts tensors alone, so it should be lower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.published_torchgpipe import layer_balance
from gpipe_cli.models import amoebanetd, unet
from gpipe_cli.profiling.memory import partition_memory
from gpipe_cli.profiling.model_stats import model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.spec import PipelineSpec
from gpipe_cli.torch_internals.deferred_values import without_values

GIB = 2**30


@final
@dataclass(frozen=True)
class Published:
    name: str
    settings: Mapping[str, int]
    """Of the model."""
    balance: Sequence[int]
    """In torchgpipe's modules; nothing for a run without recomputation."""
    gib: float
    """Of all devices together."""


@final
@dataclass(frozen=True)
class Model:
    name: str
    build: Callable[..., nn.Sequential]
    side: int
    rows: int
    """Of a mini-batch."""
    modules: Callable[[Mapping[str, int]], Sequence[int]]
    """How many of torchgpipe's modules each layer has."""
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    lines: Sequence[Published]


def _unet_line(name: str, size: tuple[int, int], balance: Sequence[int], gib: float) -> Published:
    convolutions, channels = size
    return Published(name, {"convolutions": convolutions, "base_channels": channels}, balance, gib)


def _unet_modules(settings: Mapping[str, int]) -> list[int]:
    convolutions = [4] * settings["convolutions"]
    return [*[*convolutions, 2] * 5, *convolutions, *[2, *convolutions] * 5, 1]


def _amoebanet_line(name: str, size: tuple[int, int], balance: Sequence[int], gib: float) -> Published:
    layers, filters = size
    return Published(name, {"num_layers": layers, "num_filters": filters}, balance, gib)


MODELS = (
    Model(
        "U-Net",
        partial(unet.build, depth=5, dropout=0.1, num_classes=1, input_shape=(3, 192, 192)),
        192,
        32,
        _unet_modules,
        lambda output, target: output.mean(),
        partial(torch.optim.SGD, lr=0.1),
        (
            _unet_line("baseline", (6, 72), (), 20.3),
            _unet_line("pipeline-1", (11, 128), (505,), 20.5),
            _unet_line("pipeline-2", (24, 128), (526, 551), 43.4),
            _unet_line("pipeline-4", (24, 160), (472, 54, 36, 515), 79.1),
            _unet_line("pipeline-8", (48, 160), (800, 140, 62, 36, 36, 36, 36, 987), 154.1),
        ),
    ),
    Model(
        "AmoebaNet-D",
        partial(amoebanetd.build, num_classes=1000, input_shape=(3, 224, 224)),
        224,
        128,
        lambda settings: [1] * (settings["num_layers"] + 6),
        functional.cross_entropy,
        torch.optim.RMSprop,
        (
            _amoebanet_line("pipeline-1", (18, 416), (24,), 3.57 + 0.91),
            _amoebanet_line("pipeline-2", (18, 544), (16, 8), 6.07 + 3.39),
            _amoebanet_line("pipeline-4", (36, 544), (16, 12, 7, 7), 11.80 + 6.91),
            _amoebanet_line("pipeline-8", (72, 512), (23, 16, 11, 6, 6, 5, 5, 6), 20.62 + 10.83),
        ),
    ),
)


@final
@dataclass(frozen=True)
class Comparison:
    model: str
    line: Published
    devices: Sequence[float]
    """The estimated GiB of each."""

    @property
    def difference(self) -> float:
        return sum(self.devices) / self.line.gib - 1


def comparisons() -> Iterator[Comparison]:
    for model in MODELS:
        for line in model.lines:
            yield Comparison(model.name, line, _estimate(model, line))


def _estimate(model: Model, line: Published) -> list[float]:
    with without_values():
        layers = model.build(**line.settings)
    modules = model.modules(line.settings)
    rows, checkpoint = (1, "always") if line.balance else (model.rows, "never")
    balance = layer_balance(modules, line.balance or [sum(modules)])
    target = torch.zeros(rows, dtype=torch.long)
    sample = Sample(torch.zeros(rows, 3, model.side, model.side), target, model.loss)
    facts = model_stats(layers, sample, count_flops=False)
    spec = PipelineSpec("gpipe", len(balance), model.rows // rows, checkpoint)
    return [
        part.total_bytes / GIB for part in partition_memory(layers, facts, balance, spec, model.optimizer)
    ]


def show(console: Console) -> None:
    console.print("\ntorchgpipe's peaks of memory in GiB, all devices together")
    table = Table("model", "setting", "size", "published", "estimated", "difference", "by device", box=None)
    for each in comparisons():
        table.add_row(
            each.model,
            each.line.name,
            str(tuple(each.line.settings.values())),
            f"{each.line.gib:.1f}",
            f"{sum(each.devices):.1f}",
            f"{100 * each.difference:+.0f} %",
            " ".join(f"{gib:.1f}" for gib in each.devices),
        )
    console.print(table)
