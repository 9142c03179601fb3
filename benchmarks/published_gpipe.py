"""GPipe's published speed-ups (Huang et al., 2019, tables 2 and 3) beside the planner's estimate for the same settings.

Recomputation is always on, and the balance is the best for the estimate. A Cloud TPU is a device of our own making,
with the figures of one core of a TPU v3. GPipe ran static graphs, so launching kernels takes no time. The batch sizes
of the paper are not known here; a micro-batch has at least 4 rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from benchmarks.published_torchgpipe import best_step_ms
from gpipe_cli.losses.token_cross_entropy import TokenCrossEntropy
from gpipe_cli.models import amoebanetd, gpt
from gpipe_cli.plan.device_costs import DeviceRun, Efficiency, estimate_costs
from gpipe_cli.plan.devices import DEVICES, own_device
from gpipe_cli.profiling.facts import ModelFacts, model_facts
from gpipe_cli.profiling.layers import Sample
from gpipe_cli.sequential.without_storage import without_storage

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
def _facts(model: str) -> ModelFacts:
    """Of a micro-batch of one row, or of two where batch norm needs them."""
    with without_storage():
        layers, sample = MODELS[model]()
    return model_facts(layers, sample)


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
    return best_step_ms(costs, line.devices, line.chunks, "always")


def show(console: Console) -> None:
    console.print("\nGPipe's speed-ups, as multiples of the first line of each table")
    table = Table(
        "model", "device", "partitions", "micro-batches", "published", "estimated", "difference", box=None
    )
    differences = []
    base = 0.0
    for line in LINES:
        ms = step_ms(line)
        if line.speed_up == 1.0:
            base = ms
        else:
            differences.append(base / ms / line.speed_up - 1)
        table.add_row(
            line.model,
            line.device,
            str(line.devices),
            str(line.chunks),
            f"{line.speed_up:.2f}",
            f"{base / ms:.2f}",
            "" if line.speed_up == 1.0 else f"{100 * differences[-1]:+.0f} %",
        )
    console.print(table)
    errors = sorted(map(abs, differences))
    console.print(
        f"differences of {len(errors)} speed-ups: median {100 * statistics.median(errors):.0f} %, "
        f"{sum(error > FAR for error in errors)} above {100 * FAR:.0f} %"
    )
