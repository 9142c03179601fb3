"""One mini-batch on its way through all partitions: what went in, what came out, what is kept for backward.

Decides nothing; it is what workers and caller hand to each other. Each entry has one writer, and whoever
reads it waits for the writer's action first, so no lock is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import final

import torch
from torch import Tensor, nn

from gpipe_cli.pipeline.boundary import Gradients, Parcel
from gpipe_cli.pipeline.context import MicroBatch
from gpipe_cli.pipeline.leaves import Collected, modified_in_place
from gpipe_cli.pipeline.minibatch import MiniBatch
from gpipe_cli.pipeline.pytree import Template
from gpipe_cli.pipeline.tied import Aliases, TiedParameters
from gpipe_cli.pipeline.visit import Head, Kept, Visit
from gpipe_cli.torch_internals.tensor_version import version_of

__all__ = ["Flight"]


@final
@dataclass(slots=True)
class Flight:
    batch: MiniBatch
    inputs: list[Parcel]
    tied: TiedParameters
    aliases: list[list[tuple[Aliases, ...]]]
    """By partition, for each of its layers; one such list for all micro-batches, or one for each."""
    checkpoint_stops: Sequence[int]
    """By partition: micro-batches before this one are checkpointed."""
    head: Head | None = None
    attached: bool = False
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)
    """By partition and micro-batch."""
    outputs: dict[int, Parcel] = field(default_factory=dict)
    output_gradients: list[Gradients] = field(default_factory=list)
    input_gradients: dict[int, Gradients] = field(default_factory=dict)
    collected: Collected | None = None
    """Leaves whose gradients a backward hands to its caller."""
    written: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By micro-batch, the memory of which a partition wrote a copy."""
    caller_written: set[int] = field(default_factory=set)
    """The places of the input's tensors that layers wrote."""
    caller_versions: list[int] = field(default_factory=list)
    """Of the input's tensors, after the forward."""
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
        aliases = self.aliases[micro_batch % len(self.aliases)]
        last = partition == len(aliases) - 1
        return Visit(
            batch=self.batch,
            micro_batch=self.micro_batches[micro_batch],
            checkpointed=micro_batch < self.checkpoint_stops[partition],
            head=self.head if last else None,
            aliases=aliases[partition],
            attached=self.attached,
            written=self.written[micro_batch],
            caller_written=self.caller_written,
        )

    def count_writes(self) -> None:
        """Let the caller's tensors count the writes of layers: each micro-batch has counted its own apart."""
        tensors = self.batch.tensors
        torch.autograd.graph.increment_version([tensors[place] for place in self.caller_written])
        self.caller_versions = [version_of(tensor) for tensor in tensors]

    def check_input(self) -> None:
        """Raise if the caller wrote a tensor that backward needs, as autograd does without a pipe."""
        if self.caller_versions != [version_of(tensor) for tensor in self.batch.tensors]:
            for (partition, _), kept in sorted(self.kept.items(), key=lambda item: item[0]):
                if kept.holds_caller:
                    raise modified_in_place("the input of the pipe", partition)

    def output_parts(self) -> list[tuple[Sequence[Tensor], Template]]:
        """What each micro-batch gave: its tensors and how the output is made of them."""
        outputs = [self.outputs[index] for index in range(len(self.micro_batches))]
        return [(output.present, output.template) for output in outputs]

    @property
    def aliases_by_layer(self) -> list[list[Aliases]]:
        """Of every layer; one such list for all micro-batches, or one for each."""
        return [list(chain.from_iterable(by_partition)) for by_partition in self.aliases]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of all layers that require grad, once each."""
        return self.tied.trained
