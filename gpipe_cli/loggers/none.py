"""logger=none: metrics.jsonl and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from gpipe_cli.loggers.protocol import Logged, Logger


def build() -> Logger:
    return Nobody()


@final
class Nobody:
    def open(self, run: Logged) -> None:
        pass

    def write(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass
