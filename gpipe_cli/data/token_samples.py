"""Samples of stored tokens: packed into windows without gaps, or one document per sample, padded to one length.

A sample has one token more than its input: the target is the input one token later. A target that is not scored is
-100. Memory is mapped, so a batch reads only its own samples from the disk.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from gpipe_cli.values import IGNORED_LABEL


@final
class PackedSamples:
    """A window of `context` tokens every `stride` tokens of a stream.

    stream: [length], integers; those that are not scored are stored as their complement.
    """

    def __init__(self, stream: Tensor, context: int, stride: int) -> None:
        self._windows = stream.unfold(0, context + 1, stride)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return inputs[0], targets[0]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        windows = self._windows.index_select(0, indices).long()
        return token_of(windows[:, :-1]), target_of(windows[:, 1:])


@final
class PaddedSamples:
    """One document per sample: longer ones are cut after `context` + 1 tokens, shorter ones padded at their end."""

    def __init__(self, stream: Tensor, spans: Tensor, context: int, padding: int) -> None:
        """spans: [samples, 2], where each document begins and ends in the stream. padding: the token for it."""
        self._stream, self._spans, self._context, self._padding = stream, spans, context, padding

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, targets = self.batch(torch.tensor([index]))
        return {name: tensor[0] for name, tensor in inputs.items()}, targets[0]

    def batch(self, indices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        shape = (len(indices), self._context)
        tokens = torch.full(shape, self._padding)
        mask = torch.zeros(shape, dtype=torch.int64)
        targets = torch.full(shape, IGNORED_LABEL)
        for row, (begin, end) in enumerate(self._spans.index_select(0, indices).tolist()):
            document = self._stream[begin : min(end, begin + self._context + 1)].long()
            length = len(document) - 1
            tokens[row, :length] = token_of(document[:-1])
            mask[row, :length] = 1
            targets[row, :length] = target_of(document[1:])
        return {"input_ids": tokens, "attention_mask": mask}, targets


def token_of(stored: Tensor) -> Tensor:
    return torch.where(stored < 0, ~stored, stored)


def target_of(stored: Tensor) -> Tensor:
    return stored.masked_fill(stored < 0, IGNORED_LABEL)
