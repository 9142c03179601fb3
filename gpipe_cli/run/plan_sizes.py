"""The sizes of mini-batches and micro-batches that a plan may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from gpipe_cli.config.overrides import sets_key
from gpipe_cli.config.schema import PlanConfig, TrainConfig
from gpipe_cli.plan.measured import MicroBatchSize
from gpipe_cli.plan.search_space import powers_of_two
from gpipe_cli.run.data import BatchLoader
from gpipe_cli.run.plan_memory import PlanMemory

MAX_CHUNKS_PER_DEVICE = 8
"""Above this the bubble is only a few per cent, and small micro-batches are slow."""


@final
@dataclass(frozen=True)
class PlanSizes:
    settings: PlanConfig | TrainConfig
    overrides: Sequence[str]
    loader: BatchLoader
    memory: PlanMemory
    devices: int
    """Of one replica."""
    replicas: int
    estimated: bool

    @cached_property
    def chooses_batch_size(self) -> bool:
        """Only `gpipe plan` does, since another batch size trains differently, and only if memory is limited."""
        settings = self.settings
        if not isinstance(settings, PlanConfig) or settings.device_memory is None:
            return False
        return settings.batch_size == PlanConfig.batch_size and not sets_key(self.overrides, "batch_size")

    @cached_property
    def batch_sizes(self) -> list[int]:
        """Smallest first."""
        if not self.chooses_batch_size:
            return [self._batch_size]
        most = min(len(self.loader.data.train), self._most_rows * self._most_chunks * self.replicas)
        return [size for size in powers_of_two(most) if size >= self.replicas]

    def chunks(self, batch_size: int) -> list[int]:
        most = max(1, batch_size // (self.replicas * self.loader.least_rows))
        if self._gives_chunks:
            return [min(self.settings.chunks, most)]
        if self.estimated and not self.chooses_batch_size:
            return powers_of_two(most)
        return [chunks for chunks in powers_of_two(most) if chunks <= self._most_chunks]

    def rows(self, batch_size: int, chunks: int) -> int:
        """Of the largest micro-batch."""
        replicas = self.replicas * self.loader.replicas
        return max(self.loader.least_rows, -(-batch_size // (chunks * replicas)))

    def to_measure(self) -> list[MicroBatchSize]:
        """In this order: first the plain run, which every plan is compared with, then ever larger micro-batches."""
        chunks_by_rows: dict[int, int] = {}
        for batch_size in self.batch_sizes:
            for chunks in self.chunks(batch_size):
                rows = self.rows(batch_size, chunks)
                if not self.chooses_batch_size or rows <= self._most_rows:
                    chunks_by_rows[rows] = max(chunks, chunks_by_rows.get(rows, 0))
        whole = self.rows(self._batch_size, 1)
        in_order = sorted(chunks_by_rows, key=lambda rows: (rows != whole, rows))
        return [MicroBatchSize(rows, chunks_by_rows[rows]) for rows in in_order]

    @property
    def _batch_size(self) -> int:
        """The one that was given, but here training cannot have more samples than there are."""
        given = self.settings.batch_size
        return given if self.estimated else min(given, len(self.loader.data.train))

    @cached_property
    def _most_rows(self) -> int:
        """Of a micro-batch that may fit."""
        rows = 1
        while 2 * rows <= len(self.loader.data.train) and self.memory.may_fit(2 * rows, self.devices):
            rows *= 2
        return rows

    @property
    def _most_chunks(self) -> int:
        return self.settings.chunks if self._gives_chunks else MAX_CHUNKS_PER_DEVICE * self.devices

    @property
    def _gives_chunks(self) -> bool:
        return sets_key(self.overrides, "chunks")
