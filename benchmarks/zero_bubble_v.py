"""Table 8 of the Zero Bubble paper (arXiv 2401.10241) beside the simulator's bubbles: two partitions per device.

The paper does not give the times that this table is computed from, only those of other sizes (Table 9). Scaled to the
layers per device and the micro-batch of Table 8, those give forward and input gradient. The weight gradient and the
transfer, which crosses machines here, are what the paper's bubbles of 1F1B and ZB-H1 in the first row of each model
imply. Everything else follows: the other two rows of these columns, and all rows of 1F1B-I and ZB-V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from rich.console import Console
from rich.table import Table

from gpipe_cli.schedule import order
from gpipe_cli.schedule.orders import zero_bubble_v
from gpipe_cli.schedule.simulate import PartitionCost, simulate

COLUMNS = ("1F1B", "1F1B-I", "ZB-H1", "ZB-V")


@final
@dataclass(frozen=True)
class VRow:
    """Milliseconds per device and micro-batch."""

    model: str
    devices: int
    chunks: int
    forward: float
    input_grad: float
    weight_grad: float
    transfer: float
    bubbles: tuple[float, float, float, float]
    """Of COLUMNS, as published."""
    gives_inputs: bool
    """Whether the bubbles of 1F1B and ZB-H1 gave the weight gradient and the transfer."""

    def simulated(self) -> tuple[float, float, float, float]:
        return (
            self._bubble("1f1b", 1),
            self._bubble("interleaved", 2),
            self._bubble("zero_bubble", 1),
            self._v(),
        )

    def _bubble(self, schedule: str, turns: int) -> float:
        partitions = turns * self.devices
        made = order(schedule, partitions, self.chunks, self.devices)
        return simulate(made, [self._cost(turns)] * partitions).bubble

    def _v(self) -> float:
        partitions = 2 * self.devices
        made = zero_bubble_v(partitions, self.chunks, self.devices)
        step = simulate(made, [self._cost(2)] * partitions).longest_part
        return 1 - self.chunks * (self.forward + self.input_grad + self.weight_grad) / step

    def _cost(self, turns: int) -> PartitionCost:
        return PartitionCost(
            self.forward / turns,
            (self.input_grad + self.weight_grad) / turns,
            transfer=self.transfer,
            input_grad=self.input_grad / turns,
            weight_grad=self.weight_grad / turns,
        )


def _rows(
    model: str,
    devices: int,
    times: tuple[float, float, float, float],
    *rows: tuple[int, tuple[float, float, float, float]],
) -> Iterator[VRow]:
    for number, (chunks, bubbles) in enumerate(rows):
        yield VRow(model, devices, chunks, *times, bubbles, gives_inputs=number == 0)


V_ROWS = (
    # Two layers per device and micro-batches of 6: as much as the four and 3 of Table 9.
    *_rows(
        "6.2B",
        16,
        (29.718, 29.444, 19.872, 1.652),
        (48, (0.2668, 0.1499, 0.1536, 0.0697)),
        (64, (0.2206, 0.1169, 0.1198, 0.0533)),
        (128, (0.1390, 0.0621, 0.0637, 0.0274)),
    ),
    # Two layers and 2: 4/3 of three and 1.
    *_rows(
        "14.6B",
        24,
        (15.130, 14.998, 11.522, 0.828),
        (72, (0.2699, 0.1519, 0.1439, 0.0638)),
        (96, (0.2229, 0.1184, 0.1121, 0.0483)),
        (192, (0.1403, 0.0630, 0.0595, 0.0250)),
    ),
    # Two layers and 2: twice two and 1.
    *_rows(
        "28.3B",
        32,
        (20.838, 20.414, 15.646, 0.942),
        (96, (0.2676, 0.1509, 0.1429, 0.0593)),
        (128, (0.2204, 0.1177, 0.1111, 0.0451)),
        (256, (0.1362, 0.0626, 0.0593, 0.0236)),
    ),
)


def show(console: Console) -> None:
    table = Table("model", "p", "m", *(f"{column} bubble" for column in COLUMNS), box=None)
    for row in V_ROWS:
        pairs = zip(row.bubbles, row.simulated(), strict=True)
        cells = (f"{published:.4f} / {simulated:.4f}" for published, simulated in pairs)
        table.add_row(row.model, str(row.devices), str(row.chunks), *cells)
    console.print("\nTwo partitions per device, there and back: published / simulated", table)
