"""One mini-batch on its way through a pipe: its key, its micro-batches, and what must hold when it is done.

Decides the frame that every pipe runs a mini-batch in. Knows nothing of how the layers inside it are run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from gpipe_cli.pipeline.batchnorm import DeferredBatchNorm
from gpipe_cli.pipeline.caller_state import CallerState
from gpipe_cli.pipeline.context import MicroBatch
from gpipe_cli.pipeline.keys import draw_key
from gpipe_cli.pipeline.microbatch import Batch, Value, micro_batches
from gpipe_cli.pipeline.pytree import Template
from gpipe_cli.schedule.checkpoint import Checkpoint, checkpoint_stops

__all__ = ["MiniBatch", "committed"]


@final
@dataclass(frozen=True, slots=True)
class MiniBatch:
    key: int
    rows: int
    micro_batches: tuple[MicroBatch, ...]
    tensors: tuple[Tensor, ...]
    """Those of the input."""
    inputs: list[tuple[Tensor, ...]]
    """What each micro-batch gets of them."""
    template: Template
    """Makes the value that enters the first layer."""
    whole: frozenset[int]
    """The places of tensors that every micro-batch gets whole."""
    state: CallerState

    @classmethod
    def of(cls, input: Value, chunks: int, key: int | None) -> MiniBatch:
        batch = Batch(input, "input")
        pieces = micro_batches(batch.rows, chunks)
        return cls(
            key=draw_key() if key is None else key,
            rows=batch.rows,
            micro_batches=pieces,
            tensors=batch.tensors,
            inputs=batch.scatter(len(pieces)),
            template=batch.template,
            whole=batch.whole,
            state=CallerState.capture(),
        )

    def checkpoint_stops(self, checkpoint: Checkpoint, partitions: int, training: bool) -> tuple[int, ...]:
        """By partition, the first micro-batch that is not checkpointed; in evaluation none is."""
        if not (training and self.state.grad):
            return (0,) * partitions
        return checkpoint_stops(checkpoint, partitions, len(self.micro_batches))


@contextlib.contextmanager
def committed(batch_norms: Sequence[DeferredBatchNorm]) -> Iterator[None]:
    """Inside, layers work on one mini-batch: deferred batch norm commits its statistics once, or not if one fails."""
    try:
        yield
    except BaseException:
        for batch_norm in batch_norms:
            batch_norm.discard()
        raise
    for batch_norm in batch_norms:
        batch_norm.commit()
