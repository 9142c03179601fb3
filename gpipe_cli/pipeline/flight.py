"""One mini-batch on its way through all partitions: what went in, what came out, what is kept for backward.

Decides nothing; it is what workers and caller hand to each other. Each entry has one writer, and whoever
reads it waits for the writer's action first, so no lock is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from gpipe_cli.pipeline.boundary import Gradients, Parcel
from gpipe_cli.pipeline.context import MicroBatch
from gpipe_cli.pipeline.minibatch import MiniBatch
from gpipe_cli.pipeline.partition import Head, Kept, Visit
from gpipe_cli.pipeline.tied import Aliases

__all__ = ["Flight"]


@final
@dataclass(slots=True)
class Flight:
    batch: MiniBatch
    inputs: list[Parcel]
    aliases: list[tuple[Aliases, ...]]
    """By partition, for each of its layers."""
    checkpoint_stops: Sequence[int]
    """By partition: micro-batches before this one are checkpointed."""
    head: Head | None = None
    attached: bool = False
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)
    """By partition and micro-batch."""
    outputs: dict[int, Parcel] = field(default_factory=dict)
    output_gradients: list[Gradients] = field(default_factory=list)
    input_gradients: dict[int, Gradients] = field(default_factory=dict)
    failure: BaseException | None = None
    """The first, where whoever runs the actions would wrap it in an error of its own."""

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        return self.batch.micro_batches

    def gradients_of_output(self, micro_batch: int) -> Gradients:
        """Where backward begins: with the caller's gradients, or with 1 for the loss of a step."""
        if self.head is None:
            return self.output_gradients[micro_batch]
        return tuple(torch.ones_like(loss) for loss in self.outputs[micro_batch].tensors if loss is not None)

    def visit(self, partition: int, micro_batch: int) -> Visit:
        last = partition == len(self.aliases) - 1
        return Visit(
            batch=self.batch,
            micro_batch=self.micro_batches[micro_batch],
            checkpointed=micro_batch < self.checkpoint_stops[partition],
            head=self.head if last else None,
            aliases=self.aliases[partition],
            attached=self.attached,
        )
