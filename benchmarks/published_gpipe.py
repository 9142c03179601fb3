"""GPipe's published speed-ups (Huang et al., 2019, tables 2 and 3) beside the planner's estimate for the same settings.

Recomputation is always on, and the costliest partition is as cheap as possible, as GPipe divides a model. A Cloud TPU
is a device of our own making, with the figures of one core of a TPU v3. GPipe ran static graphs, so launching kernels
takes no time. The paper adjusted its batch sizes to the memory and does not give them: here every line has the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from gpipe_cli.balance.solver import solve
from gpipe_cli.losses.cross_entropy import TokenCrossEntropy
from gpipe_cli.models import amoebanetd, gpt
from gpipe_cli.plan.device_table import DEVICES, own_device
from gpipe_cli.plan.estimated import DeviceRun, Efficiency, estimate_costs
from gpipe_cli.plan.step_time import simulated_step
from gpipe_cli.profiling.model_stats import ModelStats, model_stats
from gpipe_cli.profiling.records import Sample
from gpipe_cli.schedule.spec import PipelineSpec
from gpipe_cli.torch_internals.deferred_values import without_values

TPU = own_device({"flops": 61.5e12, "memory": 16 * 2**30, "bandwidth": 450e9, "link": 70e9})
TOKENS, VOCABULARY = 1024, 32_000
ROWS = 128
"""Of a mini-batch."""
FAR = 0.25


@final
@dataclass(frozen=True)
class Published:
    """Throughput of a model on so many devices with so many micro-batches, as a multiple of a table's first entry."""

    model: str
    device: str
    devices: int
    chunks: int
    speed_up: float

    @property
    def most(self) -> float:
        """No step of the same mini-batch is faster than the first entry of its table by more.

        At best all partitions are equal, transfers take no time and every recomputation is hidden, which leaves
        (M + K - 1) / M of the K-th part of a forward and a backward; at worst the first entry runs one device at a
        time, and its recomputation is another forward, a third of the two.
        """
        return 4 / 3 * self.devices * self.chunks / (self.chunks + self.devices - 1)


LINES = (
    *(
        Published("Transformer-48", "TPU", devices, chunks, speed_up)
        for chunks, speed_ups in ((1, (1.0, 1.07, 1.3)), (4, (1.7, 3.2, 4.8)), (32, (1.8, 3.4, 6.3)))
        for devices, speed_up in zip((2, 4, 8), speed_ups, strict=True)
    ),
    *(
        Published(model, "P100", devices, 32, speed_up)
        for model, speed_ups in (
            ("Transformer-48", (1.0, 1.8, 3.3)),
            ("AmoebaNet-D (18, 128)", (1.0, 1.7, 2.7)),
        )
        for devices, speed_up in zip((2, 4, 8), speed_ups, strict=True)
    ),
)


@cache
def _facts(model: str) -> ModelStats:
    """Of a micro-batch of one row, or of two where batch norm needs them."""
    with without_values():
        layers, sample = MODELS[model]()
    return model_stats(layers, sample)


def _transformer() -> tuple[nn.Sequential, Sample]:
    # Table 1: a model dimension of 2048, 32 heads, sequences of 1024 tokens, a vocabulary of 32k.
    layers = gpt.build(2048, 48, 32, vocabulary=VOCABULARY, input_shape=(TOKENS,))
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    return layers, Sample(tokens, tokens, TokenCrossEntropy())


def _amoebanet() -> tuple[nn.Sequential, Sample]:
    layers = amoebanetd.build(num_layers=18, num_filters=128, num_classes=1000, input_shape=(3, 224, 224))
    return layers, Sample(
        torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.long), functional.cross_entropy
    )


MODELS: dict[str, Callable[[], tuple[nn.Sequential, Sample]]] = {
    "Transformer-48": _transformer,
    "AmoebaNet-D (18, 128)": _amoebanet,
}


def step_ms(line: Published) -> float:
    facts = _facts(line.model)
    counted = facts.input.shapes[0][0]
    device, precision = (TPU, "bf16") if line.device == "TPU" else (DEVICES["p100"], "fp32")
    run = DeviceRun(device, precision, reached=Efficiency(launch_ms=0.0))
    costs = estimate_costs(facts, run, ROWS / line.chunks / counted)
    layers = [costs.partition(layer, layer + 1) for layer in range(costs.layers)]
    balance = solve([layer.forward + layer.backward for layer in layers], line.devices).balance
    spec = PipelineSpec("gpipe", line.devices, line.chunks, "always")
    return simulated_step(spec, costs.partitions(balance, spec))


@final
@dataclass(frozen=True)
class Comparison:
    line: Published
    estimated: float
    """The speed-up."""

    @property
    def difference(self) -> float:
        return self.estimated / self.line.speed_up - 1

    @property
    def reason(self) -> str:
        """Why the two are far apart."""
        if abs(self.difference) <= FAR:
            return ""
        if self.line.speed_up > self.line.most:
            return f"impossible with equal batches: at most {self.line.most:.1f}"
        return "unknown"


def comparisons() -> Iterator[Comparison]:
    base = 0.0
    for line in LINES:
        ms = step_ms(line)
        if line.speed_up == 1.0:
            base = ms
        yield Comparison(line, base / ms)


def show(console: Console) -> None:
    console.print("\nGPipe's speed-ups, as multiples of the first line of each table")
    table = Table(
        *("model", "device", "partitions", "micro-batches", "published", "estimated", "difference", "reason"),
        box=None,
    )
    lines = list(comparisons())
    for each in lines:
        table.add_row(
            each.line.model,
            each.line.device,
            str(each.line.devices),
            str(each.line.chunks),
            f"{each.line.speed_up:.2f}",
            f"{each.estimated:.2f}",
            f"{100 * each.difference:+.0f} %" if each.difference else "",
            each.reason,
        )
    console.print(table)
    for device in ("TPU", "P100"):
        errors = [abs(each.difference) for each in lines if each.line.device == device and each.difference]
        console.print(
            f"differences of {len(errors)} speed-ups on {device}s: median "
            f"{100 * statistics.median(errors):.0f} %, largest {100 * max(errors):.0f} %"
        )
