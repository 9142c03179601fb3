"""What is seen while training: a live panel on a terminal, plain lines elsewhere; both on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, final

from gpipe_cli.report.eta import Eta
from gpipe_cli.report.output import say
from gpipe_cli.report.panel import Panel


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

    def load(self, busy: Sequence[float], bubble: float, memory: Sequence[int | None]) -> None:
        """How busy each partition was, and the bytes its device held, where it tells."""

    def say(self, line: str) -> None:
        """Something worth a line of its own."""


def on_terminal() -> bool:
    """Whether somebody sees a panel that is redrawn in place."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def watcher(steps: int, epochs: int, every: int, partitions: Sequence[Mapping[str, Any]] = ()) -> Watcher:
    """The one that fits where stderr goes; `partitions` as for a Panel."""
    return Panel(steps, epochs, partitions) if on_terminal() else Lines(steps, epochs, every)


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

    def load(self, busy: Sequence[float], bubble: float, memory: Sequence[int | None]) -> None:
        """A line has no room for it."""

    def say(self, line: str) -> None:
        say(line)
