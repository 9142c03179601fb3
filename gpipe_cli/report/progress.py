"""Training progress on stderr: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, final

from gpipe_cli.report.output import print_status
from gpipe_cli.report.panel import Eta, ProgressPanel


class ProgressDisplay(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def step(
        self, step: int, epoch: int, loss: float, lr: float, samples_per_second: float, extra: str = ""
    ) -> None:
        """Show that a training step is done; `extra` is more text about it."""

    def utilisation(self, busy: Sequence[float], bubble: float, memory: Sequence[int | None]) -> None:
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

    def utilisation(self, busy: Sequence[float], bubble: float, memory: Sequence[int | None]) -> None:
        """Shown by the panel only."""

    def print_status(self, line: str) -> None:
        print_status(line)
