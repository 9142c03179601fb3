"""Training progress on stderr: a live panel on a terminal, plain lines elsewhere.

This file has what both receive, what they derive from it (the mean of the losses, the time left), and the lines.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, final

from gpipe_cli.activity import activity, on_terminal
from gpipe_cli.report.formatting import format_value
from gpipe_cli.report.output import print_status

FIRST_INTERVAL, LAST_INTERVAL = 10.0, 600.0
"""Seconds between two lines at the start of a run, and at most."""
INTERVAL_SHARE = 0.1
"""In between, the next line comes after this fraction of the time the run has taken."""
UNHURRIED_EVALUATIONS = 20
"""So many evaluations have a line each; after them, only one that comes when a line is due."""
MEAN_STEPS = 20
"""The train loss shown is the mean over this many of the last steps: that of a single mini-batch jumps."""


@final
@dataclass(frozen=True)
class RunSize:
    """What does not change during a run."""

    steps: int
    epochs: int
    eval_batches: int | None = None
    """Mini-batches of an evaluation, if that is known; 0: the run evaluates nothing."""
    partitions: Sequence[Mapping[str, Any]] = ()
    """A row for each, with `device`, its first and last layer, and sizes in bytes as far as they are known."""


@final
@dataclass(frozen=True)
class ShownStep:
    """What is shown of a training step."""

    step: int
    epoch: int
    loss: float
    lr: float
    samples_per_second: float
    seconds: float
    """Training time since step 0, across resumes."""
    grad_norm: float | None = None
    extra: str = ""
    """More text about the step."""


@final
@dataclass(frozen=True)
class ShownEvaluation:
    step: int
    epoch: int
    loss: float
    means: Mapping[str, float]
    seconds: float

    @property
    def result(self) -> str:
        means = "".join(f" | {name} {format_value(name, value)}" for name, value in self.means.items())
        return f"eval loss {self.loss:.4f}{means}"

    def line(self, size: RunSize) -> str:
        return (
            f"step {self.step}/{size.steps} | epoch {self.epoch + 1}/{size.epochs} | {self.result}"
            f" | elapsed {format_clock(self.seconds)}"
        )


class ProgressDisplay(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...
    def step(self, step: ShownStep) -> None:
        """Show that a training step is done."""

    def evaluating(self, batches: int) -> None:
        """Show that an evaluation is under way and has done so many mini-batches."""

    def evaluated(self, evaluation: ShownEvaluation) -> None:
        """Show the result of an evaluation."""

    def utilization(self, busy: Sequence[float], bubble: float, memory: Sequence[int | None]) -> None:
        """Show how busy each partition was, and the bytes its device held, where the device reports them."""

    def watch_stop(self, requested: Callable[[], bool]) -> None:
        """From now on, show when a stop is requested: the step under way may take long."""

    def print_status(self, line: str) -> None:
        """Print a line of its own."""

    def print_log(self, line: str) -> None:
        """Print one of many lines, from any thread; it may appear a moment later."""


@final
class Progress:
    """How far a run is: its last step, the mean of its last losses, and the time it still needs."""

    def __init__(self, size: RunSize) -> None:
        self._size = size
        self._losses: deque[float] = deque(maxlen=MEAN_STEPS)
        self._first: ShownStep | None = None
        self.last: ShownStep | None = None
        self.remaining: float | None = None
        """Seconds, at the pace up to now; None while that is unknown."""

    def after(self, step: ShownStep) -> None:
        self.last = step
        if math.isfinite(step.loss):  # a step of fp16 whose update was skipped may have any
            self._losses.append(step.loss)
        if self._first is None:
            self._first = step  # it warms up; with it the estimate would be too long
            return
        pace = (step.seconds - self._first.seconds) / max(1, step.step - self._first.step)
        self.remaining = pace * (self._size.steps - step.step)

    @property
    def loss(self) -> float:
        return sum(self._losses) / len(self._losses) if self._losses else math.nan

    @property
    def averaged(self) -> int:
        """How many steps `loss` is the mean of."""
        return len(self._losses)

    def line(self) -> str:
        """All that matters, in a line that can stand alone."""
        assert self.last is not None, "a step is done"
        step, size = self.last, self._size
        return (
            f"step {step.step}/{size.steps} | epoch {step.epoch + 1}/{size.epochs} | train loss {self.loss:.4f}"
            f" | lr {step.lr:.3g} | {format_speed(step.samples_per_second)}{step.extra and f' | {step.extra}'}"
            f" | elapsed {format_clock(step.seconds)} | remaining {format_clock(self.remaining)}"
        )


def format_speed(samples_per_second: float) -> str:
    digits = 0 if samples_per_second >= 10 else 2
    return f"{samples_per_second:.{digits}f} samples/s"


def format_clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, whole_seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"


@final
class ProgressLines:
    """A line after the first and the last step, and in between from time to time: less often the longer a run takes."""

    def __init__(self, size: RunSize) -> None:
        self._size = size
        self._progress = Progress(size)
        self._began: float | None = None
        self._due = -math.inf
        self._evaluations = 0
        self._evaluated_batches: int | None = None

    def __enter__(self) -> Self:
        activity.now("running the first step")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, step: ShownStep) -> None:
        activity.end()
        self._progress.after(step)
        if self._is_due(step.seconds) or step.step == self._size.steps:
            print_status(self._progress.line())
            self._printed(step.seconds)

    def evaluating(self, batches: int) -> None:
        began, self._evaluated_batches = self._evaluated_batches is None, batches
        if began:
            total = self._size.eval_batches or "?"
            activity.now(lambda: f"evaluating, mini-batch {self._evaluated_batches} of {total}")

    def evaluated(self, evaluation: ShownEvaluation) -> None:
        activity.end()
        self._evaluated_batches = None
        self._evaluations += 1
        is_last = evaluation.step == self._size.steps
        if self._evaluations <= UNHURRIED_EVALUATIONS or is_last or self._is_due(evaluation.seconds):
            print_status(evaluation.line(self._size))
            if self._evaluations > UNHURRIED_EVALUATIONS:
                self._printed(evaluation.seconds)

    def _is_due(self, seconds: float) -> bool:
        return seconds >= self._due

    def _printed(self, seconds: float) -> None:
        if self._began is None:
            self._began = seconds  # a resumed run does not start with the long intervals of its end
        share = INTERVAL_SHARE * (seconds - self._began)
        self._due = seconds + min(LAST_INTERVAL, max(FIRST_INTERVAL, share))

    def utilization(self, busy: Sequence[float], bubble: float, memory: Sequence[int | None]) -> None:
        """Shown by the panel only."""

    def watch_stop(self, requested: Callable[[], bool]) -> None:
        """Shown by the panel only."""

    def print_status(self, line: str) -> None:
        print_status(line)

    def print_log(self, line: str) -> None:
        print_status(line)


def progress_display(size: RunSize) -> ProgressDisplay:
    """The display that suits stderr."""
    if not on_terminal():
        return ProgressLines(size)
    from gpipe_cli.report.panel import ProgressPanel  # it imports this file

    return ProgressPanel(size)
