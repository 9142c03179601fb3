"""What is seen while training: a bar on a terminal, plain lines elsewhere; both on stderr."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Protocol, Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gpipe_cli.report.output import say
from gpipe_cli.report.text import plain


class Watcher(Protocol):
    """Who is told how training goes."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def step(
        self, step: int, epoch: int, loss: float, lr: float, samples_per_second: float, more: str = ""
    ) -> None:
        """A training step is done; `more` is what else there is to say of it."""

    def say(self, line: str) -> None:
        """Something worth a line of its own."""


def watcher(steps: int, epochs: int, every: int) -> Watcher:
    """The one that fits where stderr goes."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return Bar(steps, epochs)
    return Lines(steps, epochs, every)


@final
class Bar:
    def __init__(self, steps: int, epochs: int) -> None:
        self._epochs = epochs
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn(
                "loss {task.fields[loss]}  lr {task.fields[lr]}  {task.fields[speed]} samples/s{task.fields[more]}"
            ),
            TextColumn("eta {task.fields[eta]}"),
            console=Console(stderr=True),
            expand=True,
        )
        self._task = self._progress.add_task(
            "", total=steps, epoch=f"1/{epochs}", loss="-", lr="-", speed="-", more="", eta="-"
        )
        self._eta = Eta(steps)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(
        self, step: int, epoch: int, loss: float, lr: float, samples_per_second: float, more: str = ""
    ) -> None:
        self._progress.update(
            self._task,
            completed=step,
            epoch=f"{epoch + 1}/{self._epochs}",
            loss=f"{loss:.4f}",
            lr=f"{lr:.2e}",
            speed=f"{samples_per_second:.0f}",
            more=more and f"  {more}",
            eta=self._eta.after(step),
        )

    def say(self, line: str) -> None:
        self._progress.console.print(plain(line), markup=False, highlight=False, soft_wrap=True)


@final
class Lines:
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
        self, step: int, epoch: int, loss: float, lr: float, samples_per_second: float, more: str = ""
    ) -> None:
        eta = self._eta.after(step)
        if step % self._every == 0 or step == self._steps:
            self.say(
                f"epoch {epoch + 1}/{self._epochs} | step {step}/{self._steps} | loss {loss:.4f} | lr {lr:.2e}"
                f" | {samples_per_second:.0f} samples/s{more and f' | {more}'} | eta {eta}"
            )

    def say(self, line: str) -> None:
        say(line)


@final
class Eta:
    """Time left, from the pace so far."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._began: float | None = None
        self._first = 0

    def after(self, step: int) -> str:
        now = time.monotonic()
        if self._began is None:  # the first step warms up and would promise too long a time
            self._began, self._first = now, step
            return "-"
        left = (now - self._began) / max(1, step - self._first) * (self._steps - step)
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
