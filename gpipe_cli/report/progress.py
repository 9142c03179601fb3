"""Training progress on stderr: a live panel on a terminal, plain lines elsewhere.

The panel fits the terminal at each redraw: on a narrow one it leaves texts out, on a low one the last partitions.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, Protocol, Self, final

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from gpipe_cli.report.formatting import format_value, one_line
from gpipe_cli.report.output import print_status

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_LOSSES = 400
"""The sparkline shows this many of the last losses."""
REDRAW_SECONDS = 0.2
"""At least this long between two frames."""
OTHER_LINES = 6
"""Lines of the terminal that are not for partitions: the rest of the panel, and some for messages above it."""
SMOOTHING = 0.8
"""Weight of the previous value in a shown share: single steps would make it flicker."""
NARROW, WIDE = 40, 70
"""Widths from which on the time left is shown, and from which on everything is."""


@final
class Eta:
    """The time left, from the pace up to now."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began: float | None = None
        self._first = 0

    def after(self, step: int) -> str:
        now = time.monotonic()
        if self._began is None:  # the first step warms up; with it the estimate would be too long
            self._began, self._first = now, step
            return "-"
        left = (now - self._began) / max(1, step - self._first) * (self._steps - step)
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@final
@dataclass(frozen=True)
class _Texts:
    """What the panel shows of the last step."""

    step: int = 0
    epoch: int = 0
    eta: str = "-"
    loss: str = "-"
    lr: str = "-"
    speed: str = "-"
    extra: str = ""


@final
class ProgressPanel:
    def __init__(
        self,
        steps: int,
        epochs: int,
        partitions: Sequence[Mapping[str, Any]],
        console: Console | None = None,
    ) -> None:
        """partitions: a row for each, with `device` and sizes in bytes as far as they are known."""
        self._steps, self._epochs = steps, epochs
        self._partitions = partitions
        self._eta = Eta(steps)
        self._texts = _Texts()
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._busy: list[float] = []
        self._bubble: float | None = None
        self._memory: Sequence[int | None] = ()
        self._console = console or Console(stderr=True)
        self._live = Live(self, console=self._console, auto_refresh=False, redirect_stdout=False)
        self._due = 0.0
        self._drawn: list[int] = []  # the widths of the lines of the last frame

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear_wrapped()
        self._live.stop()

    def step(
        self, step: int, epoch: int, loss: float, lr: float, samples_per_second: float, extra: str = ""
    ) -> None:
        self._losses.append(loss)
        speed = f"{samples_per_second:.0f}"
        self._texts = _Texts(step, epoch, self._eta.after(step), f"{loss:.4f}", f"{lr:.2e}", speed, extra)
        self._redraw()

    def utilization(self, busy: Sequence[float], bubble: float, memory: Sequence[int | None]) -> None:
        before = self._busy or busy
        self._busy = [_smooth(old, new) for old, new in zip(before, busy, strict=True)]
        self._bubble = bubble if self._bubble is None else _smooth(self._bubble, bubble)
        self._memory = memory
        self._redraw()

    def print_status(self, line: str) -> None:
        self._clear_wrapped()
        self._console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        shown = max(0, console.size.height - OTHER_LINES)
        rows = list(self._rows(width)) if self._busy else []
        hidden = len(rows) - shown
        if hidden > 0:
            rows = [*rows[: shown - 1], (Text(f"... and {hidden + 1} more", style="dim"),)]
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
            self._clear_wrapped()
            self._live.refresh()
            self._due = time.monotonic() + REDRAW_SECONDS

    def _clear_wrapped(self) -> None:
        """Erase what a terminal that became narrower made of the last frame: it wraps each line into several, while
        rich goes back and clears only as many lines as it wrote."""
        width = max(1, self._console.width)
        for _ in range(sum((drawn - 1) // width for drawn in self._drawn if drawn)):
            self._console.control(Control((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)))
        self._drawn = []

    def _progress(self, width: int) -> Table:
        texts = self._texts
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=self._steps, completed=texts.step)
        end = f"{texts.step}/{self._steps}" + (f"  eta {texts.eta}" if width >= NARROW else "")
        row.add_row(f"epoch {texts.epoch + 1}/{self._epochs}", bar, end)
        return row

    def _loss(self, width: int, ascii_only: bool) -> Text:
        line = Text(f"loss {self._texts.loss} ", no_wrap=True, overflow="crop")
        if not ascii_only and _can_print(self._console, BLOCKS):
            line.append(sparkline(self._losses, max(0, width - len(line))), style="cyan")
        return line

    def _numbers(self) -> Text:
        texts = self._texts
        parts = [f"lr {texts.lr}", f"{texts.speed} samples/s"]
        if self._bubble is not None:
            parts.append(f"bubble {100 * self._bubble:.0f} %")
        if texts.extra:
            parts.append(texts.extra)
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

    def _rows(self, width: int) -> Iterable[Sequence[Any]]:
        for index, busy in enumerate(self._busy):
            partition = self._partitions[index] if index < len(self._partitions) else {}
            device = one_line(str(partition.get("device", "")))
            bar = ProgressBar(
                total=1.0, completed=min(1.0, busy), complete_style="green", finished_style="green"
            )
            row: list[Any] = [Text(f"{index} {device}" if width >= WIDE else str(index)), bar]
            row.append(Text(f"{100 * busy:.0f} % busy"))
            if width >= WIDE:
                row.append(Text(self._memory_text(index, partition), style="dim"))
            yield row

    def _memory_text(self, index: int, partition: Mapping[str, Any]) -> str:
        """The peak, if the device reports it; else an estimate of what stays allocated between steps."""
        measured = self._memory[index] if index < len(self._memory) else None
        if measured is not None:
            return f"{format_value('bytes', measured)} at most"
        keys = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
        sizes = [partition[key] for key in keys if key in partition]
        return f"{format_value('bytes', sum(sizes))} + activations" if sizes else ""


def sparkline(values: Iterable[float], width: int) -> str:
    """The values as at most `width` blocks of different heights; if all are equal, the blocks are low."""
    points = list(values)
    if not points or width <= 0:
        return ""
    parts = min(width, len(points))
    ends = [round(index * len(points) / parts) for index in range(parts + 1)]
    means = [sum(points[begin:end]) / (end - begin) for begin, end in pairwise(ends)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round(scale * (mean - low))] for mean in means)


def _smooth(before: float, now: float) -> float:
    return SMOOTHING * before + (1 - SMOOTHING) * now


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


def _can_print(console: Console, text: str) -> bool:
    try:
        text.encode(console.encoding or sys.getdefaultencoding())
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class ProgressDisplay(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def step(
        self, step: int, epoch: int, loss: float, lr: float, samples_per_second: float, extra: str = ""
    ) -> None:
        """Show that a training step is done; `extra` is more text about it."""

    def utilization(self, busy: Sequence[float], bubble: float, memory: Sequence[int | None]) -> None:
        """Show how busy each partition was, and the bytes its device held, where the device reports them."""

    def print_status(self, line: str) -> None:
        """Print a line of its own."""


def on_terminal() -> bool:
    """Whether stderr is a terminal that can show a panel."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def progress_display(
    steps: int, epochs: int, every: int, partitions: Sequence[Mapping[str, Any]] = ()
) -> ProgressDisplay:
    """The display that suits stderr; partitions: as for ProgressPanel."""
    return ProgressPanel(steps, epochs, partitions) if on_terminal() else ProgressLines(steps, epochs, every)


@final
class ProgressLines:
    """A line every few steps."""

    def __init__(self, steps: int, epochs: int, every: int) -> None:
        self._steps, self._epochs, self._every = steps, epochs, every
        self._eta = Eta(steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def step(
        self, step: int, epoch: int, loss: float, lr: float, samples_per_second: float, extra: str = ""
    ) -> None:
        eta = self._eta.after(step)
        if step % self._every == 0 or step == self._steps:
            print_status(
                f"epoch {epoch + 1}/{self._epochs} | step {step}/{self._steps} | loss {loss:.4f} | lr {lr:.2e}"
                f" | {samples_per_second:.0f} samples/s{extra and f' | {extra}'} | eta {eta}"
            )

    def utilization(self, busy: Sequence[float], bubble: float, memory: Sequence[int | None]) -> None:
        """Shown by the panel only."""

    def print_status(self, line: str) -> None:
        print_status(line)
