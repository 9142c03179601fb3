"""What a transformer block takes on an A100: in the published iterations of GPT, and as the Zero Bubble paper has it.

The study of the iterations says that they recompute activations. Its own rows say otherwise:

- Rows that differ only in micro-batches, or only in replicas, differ by the same time to the microsecond. So they are
  sums of the times of operations, and differences of rows give the time of one block.
- A block with a hidden size of 2048 and micro-batches of 4 reaches 153 TFLOPS if it recomputes nothing, and 203 if it
  does. The Zero Bubble paper measured 165 on A100s for a larger block (2304 and 6) that recomputes nothing.

So the estimates are without recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import final

from rich.console import Console
from rich.table import Table

from benchmarks.published_gpt import Row, gpt_facts, read_rows
from gpipe_cli.plan.device_table import DEVICES
from gpipe_cli.plan.estimated import DeviceRun, estimate_costs

SEQUENCE = 1024


@final
@dataclass(frozen=True)
class Block:
    """The transformer blocks of one partition."""

    source: str
    hidden: int
    heads: int
    micro_batch: int
    blocks: int
    published_ms: float
    """Forward and backward of one micro-batch."""

    @property
    def estimated_ms(self) -> float:
        facts = gpt_facts(self.hidden, self.blocks, self.heads, SEQUENCE, self.micro_batch)
        costs = estimate_costs(facts, DeviceRun(DEVICES["a100"], "fp16"))
        part = costs.partition(1, 1 + self.blocks)  # between the embedding and the head
        return part.forward + part.backward

    def tflops(self, *, recomputes: bool) -> float:
        """Reached by its matrix products over the whole time."""
        tokens = self.micro_batch * SEQUENCE
        forward = 24 * tokens * self.hidden**2 + 4 * tokens * SEQUENCE * self.hidden
        return (4 if recomputes else 3) * forward * self.blocks / self.published_ms / 1e9


MEASURED = (
    Block("Zero Bubble 1.5B", 2304, 24, 6, 3, 18.522 + 18.086 + 9.337),
    Block("Zero Bubble 6.2B", 4096, 32, 3, 4, 29.718 + 29.444 + 19.927),
    Block("Zero Bubble 14.6B", 5120, 40, 1, 3, 11.347 + 11.248 + 8.132),
    Block("Zero Bubble 28.3B", 6144, 48, 1, 2, 10.419 + 10.207 + 7.715),
)
"""Forward, input gradient and weight gradient of a partition in the middle (the paper's Table 9). No constant is fitted
to them."""


def blocks_of(rows: Sequence[Row]) -> list[Block]:
    """The blocks that rows of one partition imply, one for each size and micro-batch."""
    micro_batches = dict(micro_batch_ms(rows))
    blocks: dict[tuple[int, int], Block] = {}
    for (few, few_ms), (many, many_ms) in combinations(sorted(micro_batches.items(), key=_layers), 2):
        if few.layers < many.layers and replace(few, layers=many.layers) == many:
            ms = (many_ms - few_ms) / (many.layers - few.layers)
            blocks[many.hidden, many.micro_batch] = Block(
                "GPT rows", many.hidden, many.heads, many.micro_batch, 1, ms
            )
    return [block for _, block in sorted(blocks.items())]


def _layers(item: tuple[Row, float]) -> int:
    return item[0].layers


def micro_batch_ms(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """What one more micro-batch takes, by the row without the numbers that do not matter."""
    for one, other in combinations([row for row in rows if row.pipeline == 1], 2):
        more = other.chunks - one.chunks
        same = replace(other, global_batch=one.global_batch, iteration_ms=one.iteration_ms) == one
        if more and same:
            ms = (other.iteration_ms - one.iteration_ms) / more
            yield replace(one, gpus=1, data_parallel=1, global_batch=1, iteration_ms=1.0), ms


def show(console: Console) -> None:
    console.print("\nTransformer blocks on an A100, forward and backward of one micro-batch")
    table = Table(
        *("source", "hidden", "micro-batch", "blocks", "published ms", "estimated ms", "error"),
        *("TFLOPS", "if it recomputed"),
        box=None,
    )
    for block in (*blocks_of(read_rows()), *MEASURED):
        ms = block.estimated_ms
        table.add_row(
            block.source,
            *map(str, (block.hidden, block.micro_batch, block.blocks)),
            f"{block.published_ms:.2f}",
            f"{ms:.2f}",
            f"{100 * (ms / block.published_ms - 1):+.0f} %",
            f"{block.tflops(recomputes=False):.0f}",
            "" if block in MEASURED else f"{block.tflops(recomputes=True):.0f}",
        )
    console.print(table)
