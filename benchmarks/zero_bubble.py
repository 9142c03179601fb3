"""The figures of the Zero Bubble paper (arXiv 2401.10241) beside the simulator's, for the costs that it measured.

All numbers were compared with the text of the paper: tables 3, 4, 5 and 9.

`python -m benchmarks.published` prints them. Times are the paper's own, of GPT models on A100s; nothing is run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from rich.console import Console
from rich.table import Table

from gpipe_cli.plan.order_problem import OrderProblem
from gpipe_cli.plan.order_search import EFFORT, search_orders, v_orders, v_shaped
from gpipe_cli.schedule import order
from gpipe_cli.schedule.simulate import PartitionCost, simulate

ACTION_MS = 1.0
"""What an action takes on a worker besides the kernels that the paper timed: Python, and the wait for the first kernels
after each exchange, for which Megatron synchronizes the device. The only constant; bubbles do without it. Fitted to any
three of the four models it is 0.9 or 1.0, and predicts the throughputs of the fourth to 4 %."""
ACTION_CHOICES = [tenths / 10 for tenths in range(5, 16)]


@final
@dataclass(frozen=True)
class Row:
    """Tables 4, 5 and 9; times in milliseconds for one micro-batch on one device."""

    model: str
    devices: int
    chunks: int
    samples: int
    """In a micro-batch."""
    turns: int
    """Partitions per device of the interleaved schedule: one for each transformer layer."""
    forward: float
    input_grad: float
    weight_grad: float
    transfer: float
    bubbles: tuple[float, float, float]
    """Of SCHEDULES."""
    throughputs: tuple[float, float, float]
    """Samples per second and GPU."""

    def costs(self, partitions_per_device: int = 1, overhead: float = 0.0) -> list[PartitionCost]:
        share = 1 / partitions_per_device
        input_grad = self.input_grad * share + overhead
        weight_grad = self.weight_grad * share + overhead
        cost = PartitionCost(
            forward=self.forward * share + overhead,
            backward=(self.input_grad + self.weight_grad) * share + overhead,
            transfer=self.transfer,
            input_grad=input_grad,
            weight_grad=weight_grad,
        )
        return [cost] * (self.devices * partitions_per_device)

    def problem(self, memory: float, overhead: float = 0.0) -> OrderProblem:
        """memory: as a multiple of what 1f1b keeps on the first device."""
        costs = tuple(replace(cost, saved_bytes=1000) for cost in self.costs(1, overhead))
        limit = memory * self.devices * costs[0].saved_bytes
        return OrderProblem(
            costs,
            tuple(range(self.devices)),
            self.chunks,
            (limit,) * self.devices,
            kept_share=KEPT_SHARES[self.model],
            synchronized=False,
        )

    def v_problem(self, micro_batches: int) -> OrderProblem:
        """Two partitions per device, there and back; each device may keep so many micro-batches."""
        return v_problem(self.costs(2), self.devices, self.chunks, micro_batches, KEPT_SHARES[self.model])

    def v_block_bubble(self, name: str) -> float:
        """That of V-Half or V-Min themselves: of their orders, the best that fits their memory."""
        problem = self.v_problem(v_published(self.devices, self.chunks)[name][0])
        made = [made for its, made in v_orders(self.chunks, self.devices) if its == name]
        return min(1 - problem.busiest(each) / problem.step_of(each) for each in made if problem.fits(each))

    def bubble(self, schedule: str) -> float:
        return self._simulate(schedule, 0.0)[1]

    def throughput(self, schedule: str, action_ms: float = ACTION_MS) -> float:
        """Samples per second and device."""
        step_ms, _ = self._simulate(schedule, action_ms)
        return self._per_second(step_ms)

    def errors(self, action_ms: float = ACTION_MS) -> list[float]:
        """Of the throughputs, relative."""
        return [
            self.throughput(schedule, action_ms) / published - 1
            for schedule, published in zip(SCHEDULES, self.throughputs, strict=True)
        ]

    def searched_throughput(self, memory: float) -> float:
        return self._per_second(search_orders(self.problem(memory, ACTION_MS), 100_000).step)

    def _per_second(self, step_ms: float) -> float:
        return 1000 * self.chunks * self.samples / step_ms / self.devices

    def _simulate(self, schedule: str, overhead: float) -> tuple[float, float]:
        turns = self.turns if schedule == "interleaved" else 1
        made = order(schedule, self.devices * turns, self.chunks, self.devices)
        simulation = simulate(made, self.costs(turns, overhead))
        return simulation.step, simulation.bubble


def v_problem(
    costs: Sequence[PartitionCost], devices: int, chunks: int, micro_batches: int, kept_share: float = 1.0
) -> OrderProblem:
    kept = tuple(replace(cost, saved_bytes=500) for cost in costs)
    memory = (micro_batches * 2 * kept[0].saved_bytes,) * devices
    return OrderProblem(kept, v_shaped(devices), chunks, memory, kept_share=kept_share, synchronized=False)


def v_published(devices: int, chunks: int) -> dict[str, tuple[int, float]]:
    """Of V-Half and V-Min (arXiv 2405.15362): the micro-batches on a device, and the bubble for equal times."""
    return {
        "v_half": ((devices + 2) // 2, devices / 2 / chunks),
        "v_min": ((devices + 4) // 3, 2 * devices / 3 / chunks),
    }


KEPT_SHARES = {"1.5B": 32 / (34 + 160 / 3), "6.2B": 32 / 74, "14.6B": 32 / 74, "28.3B": 32 / 74}
"""Of what a transformer layer saves, (34 + 5 x heads x length / hidden) x length x hidden, the weight gradients need
32 x length x hidden (the paper's Table 1)."""
ZB_2P = {"1.5B": 0.0433, "6.2B": 0.0029, "14.6B": 0.0066, "28.3B": 0.0038}
"""The paper's searched orders with twice the memory of 1F1B, for the fewest micro-batches. Workers do not wait for each
other between steps."""
ZB_2P_THROUGHPUTS = {"1.5B": 14.5, "6.2B": 4.32, "14.6B": 1.81, "28.3B": 0.99}


SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
"""The paper's 1F1B, 1F1B-I and ZB-H1; the throughput of the last is that of its ZB-1p, which has the same bubble."""


def _rows(model: str, devices: int, samples: int, turns: int, *numbers: tuple[float, ...]) -> Iterator[Row]:
    for chunks, forward, input_grad, weight_grad, transfer, *published in numbers:
        yield Row(
            model,
            devices,
            int(chunks),
            samples,
            turns,
            forward,
            input_grad,
            weight_grad,
            transfer,
            (published[0], published[1], published[2]),
            (published[3], published[4], published[5]),
        )


ROWS = (
    *_rows(
        "1.5B",
        8,
        6,
        3,
        (24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585, 11.8, 13.1, 12.9),
        (32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242, 12.5, 13.4, 13.4),
        (64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674, 13.6, 13.9, 14.2),
    ),
    *_rows(
        "6.2B",
        8,
        3,
        4,
        (24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808, 0.1323, 3.50, 4.01, 3.88),
        (32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628, 0.1045, 3.70, 4.08, 4.00),
        (64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320, 0.0554, 4.03, 4.19, 4.20),
    ),
    *_rows(
        "14.6B",
        16,
        1,
        3,
        (48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1104, 0.1397, 1.40, 1.54, 1.61),
        (64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.0852, 0.1088, 1.49, 1.59, 1.67),
        (128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0445, 0.0576, 1.64, 1.66, 1.76),
    ),
    *_rows(
        "28.3B",
        32,
        1,
        2,
        (96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1493, 0.1421, 0.76, 0.82, 0.87),
        (128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1164, 0.1106, 0.80, 0.85, 0.90),
        (256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0624, 0.0594, 0.88, 0.90, 0.96),
    ),
)


def left_out() -> Iterator[tuple[str, float, list[float]]]:
    """For each model the constant with the least error for the three others, and the errors it makes for this one."""
    errors = {(row, action_ms): row.errors(action_ms) for row in ROWS for action_ms in ACTION_CHOICES}

    def mean(action_ms: float, model: str) -> float:
        return statistics.fmean(
            abs(error) for row in ROWS if row.model != model for error in errors[row, action_ms]
        )

    for model in dict.fromkeys(row.model for row in ROWS):
        best = min(ACTION_CHOICES, key=partial(mean, model=model))
        yield model, best, [error for row in ROWS if row.model == model for error in errors[row, best]]


def show() -> None:
    """Print bubbles and throughputs, each as published / simulated."""
    columns = [f"{name} {what}" for what in ("bubble", "per s") for name in SCHEDULES]
    table = Table("model", "p", "m", *columns, box=None)
    for row in ROWS:
        bubbles = zip(row.bubbles, map(row.bubble, SCHEDULES), strict=True)
        throughputs = zip(row.throughputs, map(row.throughput, SCHEDULES), strict=True)
        table.add_row(
            row.model,
            str(row.devices),
            str(row.chunks),
            *(f"{published:.4f} / {simulated:.4f}" for published, simulated in bubbles),
            *(f"{published:.2f} / {simulated:.2f}" for published, simulated in throughputs),
        )
    Console(width=150).print("\nThe Zero Bubble paper: published / simulated", table)
    for model, action_ms, errors in left_out():
        Console(width=150).print(
            f"throughputs of {model} with the constant fitted to the other models, {action_ms} ms: "
            f"errors from {100 * min(errors):+.1f} to {100 * max(errors):+.1f} %"
        )
    searched = Table(
        "model",
        "p",
        "m",
        "ZB-1p bubble",
        "ZB-2p bubble",
        "lower bound",
        "ZB-2p per s",
        "V-Half bubble",
        "V-Min bubble",
        "seconds",
        box=None,
    )
    for row in ROWS:
        if row.chunks == 3 * row.devices:
            began = time.perf_counter()
            once, twice = (search_orders(row.problem(memory)) for memory in (1.0, 2.0))
            less = [
                (
                    published,
                    row.v_block_bubble(name),
                    search_orders(row.v_problem(kept), max(EFFORT, 600 * row.devices * row.chunks)),
                )
                for name, (kept, published) in v_published(row.devices, row.chunks).items()
            ]
            seconds = time.perf_counter() - began
            searched.add_row(
                row.model,
                str(row.devices),
                str(row.chunks),
                f"{row.bubbles[2]:.4f} / {once.bubble:.4f}",
                f"{ZB_2P[row.model]:.4f} / {twice.bubble:.4f}",
                f"{max(0.0, 1 - (1 - twice.bubble) * twice.step / twice.bound):.4f}",
                f"{ZB_2P_THROUGHPUTS[row.model]:.2f} / {row.searched_throughput(2.0):.2f}",
                *(f"{published:.4f} / {block:.4f} / {found.bubble:.4f}" for published, block, found in less),
                f"{seconds:.1f}",
            )
    Console(width=150).print(
        "Searched orders with once and twice the memory of 1F1B: published / found; with that of V-Half and V-Min: "
        "published for equal times / their own orders with these times / found",
        searched,
    )
