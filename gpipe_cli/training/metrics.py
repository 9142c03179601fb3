"""Loss and measures of many batches together, and the file they go to. What is measured is the loss's matter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from gpipe_cli.training.line_file import LineFile


@final
class Tally:
    """Loss and counts of many batches, weighted by their samples."""

    def __init__(self) -> None:
        self.samples = 0
        self._loss = 0.0
        self._sums: dict[str, float] = {}

    def add(self, loss: float, samples: int, sums: Mapping[str, float]) -> None:
        self.samples += samples
        self._loss += loss * samples
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    @property
    def loss(self) -> float:
        return self._loss / self.samples

    @property
    def means(self) -> dict[str, float]:
        return {name: value / self.samples for name, value in self._sums.items()}


@final
class MetricsFile:
    """metrics.jsonl: one JSON object per line, each on disk as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self.file = LineFile(path)

    def write(self, row: Mapping[str, Any]) -> None:
        self.file.write(f"{json.dumps(row)}\n")

    def sync(self) -> None:
        """On the disk itself: a snapshot must not outlive the rows before it."""
        self.file.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
