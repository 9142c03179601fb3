"""One mini-batch on its way through a pipe: its key, its micro-batches, and what must hold when it is done.

Decides the frame that every pipe runs a mini-batch in. Knows nothing of how the layers inside it are run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm
from gpipe_cli.pipeline.caller_state import CallerState
from gpipe_cli.pipeline.context import MicroBatch
from gpipe_cli.pipeline.keys import DefaultGenerators, GeneratorMoved, draw_key
from gpipe_cli.pipeline.layer import Layer
from gpipe_cli.pipeline.microbatch import Value, batch_size, check, micro_batches, scatter
from gpipe_cli.schedule.checkpoint import Checkpoint, checkpoint_stops

__all__ = ["MiniBatch", "guarded"]


@final
@dataclass(frozen=True, slots=True)
class MiniBatch:
    key: int
    rows: int
    micro_batches: tuple[MicroBatch, ...]
    inputs: list[Value]
    state: CallerState

    @classmethod
    def of(cls, input: Value, chunks: int, key: int | None) -> MiniBatch:
        rows = batch_size(check(input))
        pieces = micro_batches(rows, chunks)
        return cls(
            key=draw_key() if key is None else key,
            rows=rows,
            micro_batches=pieces,
            inputs=scatter(input, len(pieces)),
            state=CallerState.capture(),
        )

    def checkpoint_stops(self, checkpoint: Checkpoint, partitions: int, training: bool) -> tuple[int, ...]:
        """By partition, the first micro-batch that is not checkpointed; in evaluation none is."""
        if not (training and self.state.grad):
            return (0,) * partitions
        return checkpoint_stops(checkpoint, partitions, len(self.micro_batches))


@contextlib.contextmanager
def guarded(
    layers: Sequence[Layer], devices: Sequence[torch.device], batch_norms: Sequence[DeferredBatchNorm]
) -> Iterator[None]:
    """Inside, layers work on one mini-batch. What that leaves behind is made good or taken back at the end.

    Layers may draw only under their keys: a draw from a default generator is an error afterwards.
    Statistics of deferred batch norm are committed once, and not at all if a layer failed.
    """
    generators = DefaultGenerators(devices)
    try:
        yield
        generators.check_unmoved()
    except BaseException as error:
        for batch_norm in batch_norms:
            batch_norm.discard()
        if isinstance(error, GeneratorMoved):
            for layer in layers:
                layer.always_keyed()
        raise
    for batch_norm in batch_norms:
        batch_norm.commit()
