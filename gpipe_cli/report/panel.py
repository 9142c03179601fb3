"""The live panel: progress, losses, speed, and a row for each partition.

It fits the terminal at each redraw: a narrow one gets fewer texts, a wide one more, and a low one fewer partitions.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, Self, final

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from gpipe_cli.activity import activity
from gpipe_cli.report.environment import process_peak_bytes
from gpipe_cli.report.formatting import format_value, one_line, whole_words
from gpipe_cli.report.output import without_control_echo
from gpipe_cli.report.progress import (
    Progress,
    RunSize,
    ShownEvaluation,
    ShownStep,
    format_clock,
    format_speed,
)

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_LOSSES = 400
"""The sparkline shows this many of the last losses."""
FRAMES_PER_SECOND = 5.0
OTHER_LINES = 7
"""Lines of the terminal that are not for partitions: the rest of the panel, and some for messages above it."""
SMOOTHING = 0.8
"""Weight of the previous value in a shown share: single steps would make it flicker."""
NARROW, MEDIUM, WIDE = 40, 70, 110
"""Widths from which on the time left is shown, then sizes and devices, then everything."""
TRAINING, EVALUATING, BUSY, SPARKS = "cyan", "blue", "green", "cyan"
"""Colors of the terminal's own palette, so that they suit its background."""


@final
class _Screen(Live):
    """Draws frames in a thread of its own, and prints lines above them.

    The cursor rests at the start of the last line: what the terminal echoes there, such as ^C, then wraps no line,
    which would leave a part of the frame behind.
    """

    def __init__(self, panel: ProgressPanel, console: Console) -> None:
        super().__init__(panel, console=console, refresh_per_second=FRAMES_PER_SECOND, redirect_stdout=False)
        self._panel = panel
        self._waiting: deque[str] = deque()

    def print_later(self, line: str) -> None:
        """Print a line with the next frame: each print draws one, which takes longer than many a layer."""
        self._waiting.append(one_line(line))

    def refresh(self) -> None:
        with self._lock:
            lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if lines:
                text = "\n".join(whole_words(line, self.console.width) for line in lines)
                self.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                super().refresh()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Put a new frame below what is printed, in the place of the last one."""
        cleared = Control(*self._clear_wrapped())
        return [cleared, *super().process_renderables(renderables), Control(ControlType.CARRIAGE_RETURN)]

    def _clear_wrapped(self) -> Iterable[Any]:
        """Erase what a terminal that became narrower made of the last frame: it wraps each line into several, while
        rich goes back and clears only as many lines as it wrote."""
        width = max(1, self.console.width)
        extra_rows = [(drawn - 1) // width if drawn else 0 for drawn in self._panel.drawn_widths]
        if not any(extra_rows):
            return ()
        # The cursor is at the start of the last line. Its further rows are below the cursor, the others above it.
        below = extra_rows.pop()
        up = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
        return ((ControlType.CURSOR_DOWN, 1),) * below + up * (below + sum(extra_rows))


@final
class ProgressPanel:
    def __init__(self, size: RunSize, console: Console | None = None) -> None:
        self._size = size
        self._progress = Progress(size)
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._evaluation: ShownEvaluation | None = None
        self._evaluated_batches: int | None = None
        self._stop_requested: Callable[[], bool] = lambda: False
        self._busy: list[float] = []
        self._bubble: float | None = None
        self._memory: Sequence[int | None] = ()
        self._seconds, self._seconds_at = 0.0, time.monotonic()
        """The time that the run had taken, and when that was."""
        self._facts = threading.Lock()
        """Held while they change or are drawn, and never while something is printed."""
        self._console = console or Console(stderr=True)
        self._screen = _Screen(self, self._console)
        self._terminal = ExitStack()
        self.drawn_widths: list[int] = []
        """The widths of the lines of the last frame."""

    def __enter__(self) -> Self:
        activity.end()
        self._terminal.enter_context(without_control_echo(self._console.file))
        self._screen.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._terminal:
            self._screen.refresh()
            # A run that is stopped or fails leaves one line, under which its last message comes.
            self._screen.transient = kind is not None
            self._screen.stop()
            if kind is not None and self._progress.last is not None:
                line = whole_words(self._progress.line(), self._console.width)
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: ShownStep) -> None:
        with self._facts:
            self._progress.after(step)
            if math.isfinite(step.loss):
                self._losses.append(step.loss)
            self._evaluated_batches = None
            self._seconds, self._seconds_at = step.seconds, time.monotonic()

    def evaluating(self, batches: int) -> None:
        with self._facts:
            began, self._evaluated_batches = self._evaluated_batches is None, batches
        if began:
            self._screen.refresh()  # say at once that an evaluation is what takes time now

    def evaluated(self, evaluation: ShownEvaluation) -> None:
        with self._facts:
            self._evaluation, self._evaluated_batches = evaluation, None
            self._seconds, self._seconds_at = evaluation.seconds, time.monotonic()
        self.print_status(evaluation.line(self._size))

    def utilization(self, busy: Sequence[float], bubble: float, memory: Sequence[int | None]) -> None:
        with self._facts:
            before = self._busy or busy
            self._busy = [_smooth(old, new) for old, new in zip(before, busy, strict=True)]
            self._bubble = bubble if self._bubble is None else _smooth(self._bubble, bubble)
            self._memory = memory

    def watch_stop(self, requested: Callable[[], bool]) -> None:
        self._stop_requested = requested

    def print_status(self, line: str) -> None:
        self._screen.print_later(line)
        self._screen.refresh()

    def print_log(self, line: str) -> None:
        self._screen.print_later(line)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._facts:
            lines = console.render_lines(self._frame(console, options), options, pad=False)
        self.drawn_widths = [Segment.get_line_length(line) for line in lines]
        for line in lines:
            yield from line
            yield Segment.line()

    def _frame(self, console: Console, options: ConsoleOptions) -> Group:
        width = options.max_width
        train_loss = self._train_loss(width, options.ascii_only)
        eval_loss = () if self._size.eval_batches == 0 else (self._eval_loss(),)
        top = (self._progress_bar(width), train_loss, *eval_loss, self._numbers(width))
        return Group(*top, *self._partitions(width, console.size.height - OTHER_LINES))

    def _progress_bar(self, width: int) -> Table:
        """The step or, during an evaluation, its mini-batch, with the time that the run has taken and still needs."""
        last, size = self._progress.last, self._size
        done, total, unit, color = 0 if last is None else last.step, size.steps, "step", TRAINING
        label = f"epoch {1 if last is None else last.epoch + 1}/{size.epochs}"
        if self._evaluated_batches is not None:
            done, total, unit, color = self._evaluated_batches, size.eval_batches or 0, "batch", EVALUATING
            label = f"evaluating, {label}" if width >= MEDIUM else "evaluating"
        if self._stop_requested():
            label = "stopping after this step" if width >= MEDIUM else "stopping"
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        numbers = f"{unit} {done}/{total or '?'}" if width >= MEDIUM else f"{done}/{total or '?'}"
        row.add_row(label, _bar(done, max(total, done), color), numbers + self._times(width))
        return row

    def _times(self, width: int) -> str:
        last = self._progress.last
        if width < NARROW:
            return ""
        elapsed = self._seconds + (time.monotonic() - self._seconds_at if self._screen.is_started else 0.0)
        remaining = self._progress.remaining
        left = None if last is None or remaining is None else remaining - (elapsed - last.seconds)
        so_far = f"  {format_clock(elapsed)} elapsed" if width >= MEDIUM else ""
        return f"{so_far}  {format_clock(left)} left"

    def _train_loss(self, width: int, ascii_only: bool) -> Text:
        averaged = self._progress.averaged
        line = Text(f"train loss {self._progress.loss:.4f} " if averaged else "train loss - ", no_wrap=True)
        line.overflow = "crop"
        if averaged > 1 and width >= MEDIUM:
            line.append(f"mean of {averaged} steps ", style="dim")
        if not ascii_only and _can_print(self._console, BLOCKS):
            line.append(sparkline(self._losses, max(0, width - len(line))), style=SPARKS)
        return line

    def _eval_loss(self) -> Text:
        evaluation = self._evaluation
        if evaluation is None:
            return Text("eval loss -", no_wrap=True)
        line = Text(evaluation.result.replace(" | ", "  "), no_wrap=True, overflow="ellipsis")
        return line.append(f"  epoch {evaluation.epoch + 1}", style="dim")

    def _numbers(self, width: int) -> Text:
        """As many of them as fit, the most important first."""
        step = self._progress.last
        parts = [] if step is None else [format_speed(step.samples_per_second), f"lr {step.lr:.3g}"]
        if step is not None and step.extra:
            parts.append(step.extra)
        if self._bubble is not None:
            meaning = " (workers idle)" if width >= MEDIUM else ""
            parts.append(f"bubble {100 * self._bubble:.0f} %{meaning}")
        if (peak := process_peak_bytes()) is not None:
            parts.append(f"process peak {format_value('bytes', peak)}")
        if step is not None and step.grad_norm is not None:
            parts.append(f"grad norm {step.grad_norm:.3g}")
        line = ""
        for part in parts:
            if len(line) + len(part) <= width:
                line += f"{part}  "
        return Text(line.rstrip(), no_wrap=True, overflow="ellipsis")

    def _partitions(self, width: int, room: int) -> Iterator[RenderableType]:
        """A row per partition; without their busy times only the panel of a pipe of several has them."""
        count = len(self._busy) or len(self._size.partitions)
        if count < 2 and not self._busy:
            return
        shown = count if count <= room else max(0, room - 1)
        grid = Table.grid(padding=(0, 1), expand=True)
        for _ in range(2 if width >= WIDE else 1):
            grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        for _ in range(2 if width >= MEDIUM else 1):
            grid.add_column(no_wrap=True, justify="right")
        for index in range(shown):
            grid.add_row(*self._row(index, width))
        yield grid
        if shown < count:
            yield Text(f"... and {count - shown} more", style="dim")

    def _row(self, index: int, width: int) -> Iterator[RenderableType]:
        partitions = self._size.partitions
        partition = partitions[index] if index < len(partitions) else {}
        device = one_line(str(partition.get("device", "")))
        yield Text(f"{index} {device}" if width >= MEDIUM else str(index))
        if width >= WIDE:
            yield Text(_layers_text(partition), style="dim", overflow="ellipsis")
        known = index < len(self._busy)
        yield _bar(self._busy[index], 1.0, BUSY) if known else ""
        yield Text(f"{100 * self._busy[index]:.0f} % busy" if known else "")
        if width >= MEDIUM:
            yield Text(self._memory_text(index, partition), style="dim")

    def _memory_text(self, index: int, partition: Mapping[str, Any]) -> str:
        """The peak, if the device reports it; else what parameters, gradients and optimizer state take."""
        measured = self._memory[index] if index < len(self._memory) else None
        if measured is not None:
            return f"{format_value('bytes', measured)} peak"
        keys = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
        sizes = [partition[key] for key in keys if key in partition]
        return f"{format_value('bytes', sum(sizes))} model state" if sizes else ""


def _layers_text(partition: Mapping[str, Any]) -> str:
    if "first" not in partition:
        return ""
    first, last = one_line(str(partition["first"])), one_line(str(partition["last"]))
    parameters = format_value("parameters", partition["parameters"])
    return f"{first if first == last else f'{first} to {last}'}, {parameters} parameters"


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


def _bar(completed: float, total: float, color: str) -> ProgressBar:
    return ProgressBar(
        total=total, completed=min(completed, total), complete_style=color, finished_style=color
    )


def _can_print(console: Console, text: str) -> bool:
    try:
        text.encode(console.encoding or sys.getdefaultencoding())
    except (UnicodeEncodeError, LookupError):
        return False
    return True
