"""Training as one live panel on a terminal: progress, the loss as a line, speed, and how busy each partition is.

Redrawn in place after a step, if it is time, and fitted to the terminal as it is at that moment: on a narrow one texts
give way to what matters, on a low one the last partitions are counted instead of shown.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, Self, final

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from gpipe_cli.report.eta import Eta
from gpipe_cli.report.numbers import readable
from gpipe_cli.report.text import plain

__all__ = ["Panel", "sparkline"]

BLOCKS = "▁▂▃▄▅▆▇█"
LOSSES = 400
"""How many of the last ones the line is drawn from."""
PAUSE = 0.2
"""Seconds between two frames, at least."""
OTHER_LINES = 6
"""Of the terminal's height: the panel's own besides the partitions, and some for what is said above it."""
STEADY = 0.8
"""How much of a shown share is what it was before: single steps would flicker."""
NARROW, WIDE = 40, 70
"""Columns from which on the time left, and from which on everything has room."""


@final
@dataclass(frozen=True)
class _At:
    """Where training is, in words."""

    step: int = 0
    epoch: int = 0
    eta: str = "-"
    loss: str = "-"
    lr: str = "-"
    speed: str = "-"
    more: str = ""


@final
class Panel:
    def __init__(
        self,
        steps: int,
        epochs: int,
        partitions: Sequence[Mapping[str, Any]],
        console: Console | None = None,
    ) -> None:
        """`partitions`: a row for each, with `device` and sizes in bytes, as far as they are known."""
        self._steps, self._epochs = steps, epochs
        self._partitions = partitions
        self._eta = Eta(steps)
        self._at = _At()
        self._losses: deque[float] = deque(maxlen=LOSSES)
        self._busy: list[float] = []
        self._bubble: float | None = None
        self._memory: Sequence[int | None] = ()
        self._console = console or Console(stderr=True)
        self._live = Live(self, console=self._console, auto_refresh=False, redirect_stdout=False)
        self._due = 0.0
        self._drawn: list[int] = []  # how wide each line of the last frame is

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear_broken()
        self._live.stop()

    def step(
        self, step: int, epoch: int, loss: float, lr: float, samples_per_second: float, more: str = ""
    ) -> None:
        self._losses.append(loss)
        speed = f"{samples_per_second:.0f}"
        self._at = _At(step, epoch, self._eta.after(step), f"{loss:.4f}", f"{lr:.2e}", speed, more)
        self._redraw()

    def load(self, busy: Sequence[float], bubble: float, memory: Sequence[int | None]) -> None:
        before = self._busy or busy
        self._busy = [STEADY * old + (1 - STEADY) * new for old, new in zip(before, busy, strict=True)]
        self._bubble = _steadied(self._bubble, bubble)
        self._memory = memory
        self._redraw()

    def say(self, line: str) -> None:
        self._clear_broken()
        self._console.print(plain(line), markup=False, highlight=False, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        shown = max(0, console.size.height - OTHER_LINES)
        rows = list(self._rows(width)) if self._busy else []
        left = len(rows) - shown
        if left > 0:
            rows = [*rows[: shown - 1], (Text(f"... and {left + 1} more", style="dim"),)]
        frame = Group(
            self._progress(width), self._loss(width, options.ascii_only), self._numbers(), *_grid(rows)
        )
        lines = console.render_lines(frame, options, pad=False)
        self._drawn = [Segment.get_line_length(line) for line in lines]
        for line in lines:
            yield from line
            yield Segment.line()

    def _redraw(self) -> None:
        if time.monotonic() >= self._due:
            self._clear_broken()
            self._live.refresh()
            self._due = time.monotonic() + PAUSE

    def _clear_broken(self) -> None:
        """Where the terminal has become narrower it has broken the lines of the last frame in two or more, of which
        rich, that goes back and clears as many lines as it wrote, would leave the first ones standing."""
        width = max(1, self._console.width)
        for _ in range(sum((drawn - 1) // width for drawn in self._drawn if drawn)):
            self._console.control(Control((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)))
        self._drawn = []

    def _progress(self, width: int) -> Table:
        at = self._at
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=self._steps, completed=at.step)
        end = f"{at.step}/{self._steps}" + (f"  eta {at.eta}" if width >= NARROW else "")
        row.add_row(f"epoch {at.epoch + 1}/{self._epochs}", bar, end)
        return row

    def _loss(self, width: int, ascii_only: bool) -> Text:
        line = Text(f"loss {self._at.loss} ", no_wrap=True, overflow="crop")
        if not ascii_only and _writes(self._console, BLOCKS):
            line.append(sparkline(self._losses, max(0, width - len(line))), style="cyan")
        return line

    def _numbers(self) -> Text:
        at = self._at
        parts = [f"lr {at.lr}", f"{at.speed} samples/s"]
        if self._bubble is not None:
            parts.append(f"bubble {100 * self._bubble:.0f} %")
        if at.more:
            parts.append(at.more)
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

    def _rows(self, width: int) -> Iterable[Sequence[Any]]:
        for index, busy in enumerate(self._busy):
            place = self._partitions[index] if index < len(self._partitions) else {}
            device = plain(str(place.get("device", "")))
            bar = ProgressBar(
                total=1.0, completed=min(1.0, busy), complete_style="green", finished_style="green"
            )
            row: list[Any] = [Text(f"{index} {device}" if width >= WIDE else str(index)), bar]
            row.append(Text(f"{100 * busy:.0f} % busy"))
            if width >= WIDE:
                row.append(Text(self._held(index, place), style="dim"))
            yield row

    def _held(self, index: int, place: Mapping[str, Any]) -> str:
        """Measured where the device tells; else what is there all the time, by estimate."""
        measured = self._memory[index] if index < len(self._memory) else None
        if measured is not None:
            return f"{readable('bytes', measured)} at most"
        known = [
            place[name] for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes") if name in place
        ]
        return f"{readable('bytes', sum(known))} + activations" if known else ""


def sparkline(values: Iterable[float], width: int) -> str:
    """The values as blocks of different heights, at most so many of them; equal ones are low."""
    found = list(values)
    if not found or width <= 0:
        return ""
    parts = min(width, len(found))
    ends = [round(index * len(found) / parts) for index in range(parts + 1)]
    means = [sum(found[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round(scale * (mean - low))] for mean in means)


def _steadied(before: float | None, now: float) -> float:
    return now if before is None else STEADY * before + (1 - STEADY) * now


def _grid(rows: Sequence[Sequence[Any]]) -> list[Table]:
    if not rows:
        return []
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    for _ in range(2):
        grid.add_column(no_wrap=True, justify="right")
    for row in rows:
        grid.add_row(*row)
    return [grid]


def _writes(console: Console, text: str) -> bool:
    try:
        text.encode(console.encoding or sys.getdefaultencoding())
    except (UnicodeEncodeError, LookupError):
        return False
    return True
