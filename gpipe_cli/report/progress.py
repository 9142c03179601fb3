"""Training progress on stderr: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Self, final

from gpipe_cli.report.output import print_status
from gpipe_cli.report.panel import ProgressPanel
from gpipe_cli.report.progress_facts import Progress, ProgressDisplay, RunSize, ShownEvaluation, ShownStep

FIRST_INTERVAL, LAST_INTERVAL = 10.0, 600.0
"""Seconds between two lines at the start of a run, and at most."""
INTERVAL_SHARE = 0.1
"""In between, the next line comes after this fraction of the time the run has taken."""
UNHURRIED_EVALUATIONS = 20
"""So many evaluations have a line each; after them, only one that comes when a line is due."""


def on_terminal() -> bool:
    """Whether stderr is a terminal that can show a panel."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def progress_display(size: RunSize) -> ProgressDisplay:
    """The display that suits stderr."""
    return ProgressPanel(size) if on_terminal() else ProgressLines(size)


@final
class ProgressLines:
    """A line after the first and the last step, and in between from time to time: less often the longer a run takes."""

    def __init__(self, size: RunSize) -> None:
        self._size = size
        self._progress = Progress(size)
        self._began: float | None = None
        self._due = -math.inf
        self._evaluations = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, step: ShownStep) -> None:
        self._progress.after(step)
        if self._is_due(step.seconds) or step.step == self._size.steps:
            print_status(self._progress.line())
            self._printed(step.seconds)

    def evaluating(self, batches: int) -> None:
        """Shown by the panel only."""

    def evaluated(self, evaluation: ShownEvaluation) -> None:
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
