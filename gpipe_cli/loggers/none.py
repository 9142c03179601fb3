"""logger=none: metrics go to metrics.jsonl only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from gpipe_cli.loggers.protocol import LoggedRun, Logger


def build() -> Logger:
    return NoLogger()


@final
class NoLogger:
    def open(self, run: LoggedRun) -> None:
        pass

    def write(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass
