"""What a comparison needs: a model of others, built on demand, and batches of several sizes for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

Batch = Tensor | dict[str, Tensor]
Padding = Literal["no", "left", "right"]
CACHES = ("past_key_values", "cache_params", "mems", "state")
PAD, END, FIRST_WORD = 0, 2, 3
"""Tokens: padding, the end of a text, and the first of the others."""


@final
@dataclass(frozen=True)
class Batches:
    """The sample that a model is traced with, batches of other sizes, and a batch of four for a training step."""

    sample: Batch
    others: Mapping[str, Batch]
    step: Batch


@final
@dataclass(frozen=True)
class Subject:
    family: str
    name: str
    task: str
    build: Callable[[float], nn.Module]
    """Returns the model with this dropout rate, its parameters drawn from torch's default generator."""
    batches: Callable[[], list[Batches]]
    """One entry per kind of input: the model is traced with the sample of each."""
    least_layers: int

    @property
    def title(self) -> str:
        return f"{self.name} ({self.task})" if self.family == "hf" else self.name


def call(model: nn.Module, batch: Batch) -> Any:
    """The output of a model, without the caches that only generation uses."""
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    if not isinstance(output, dict) or not any(name in CACHES for name in output):
        return output
    return type(output)(**{name: value for name, value in output.items() if name not in CACHES})


def image_batches(*shape: int) -> list[Batches]:
    others = {f"batch {size}": torch.randn(size, *shape) for size in (1, 3)}
    return [Batches(torch.randn(2, *shape), others, torch.randn(4, *shape))]


def text_batches(vocabulary: int, multiple: int = 1) -> list[Batches]:
    """Padded samples with a mask, and packed samples without one.

    multiple: lengths are multiples of it.
    """

    def padded(batch: int, length: int, padding: Padding) -> dict[str, Tensor]:
        return _text(vocabulary, batch, length * multiple, padding)

    masked = Batches(
        padded(2, 8, "right"),
        {
            "3 texts of length 8, not padded": padded(3, 8, "no"),
            "2 texts of length 11, not padded": padded(2, 11, "no"),
            "3 texts of length 13, padded on the right": padded(3, 13, "right"),
            "4 texts of length 7, padded on the left": padded(4, 7, "left"),
            "1 text of length 5": padded(1, 5, "no"),
        },
        # On the right: in float64, some models compute NaN for a row whose first tokens are padding.
        padded(4, 9, "right"),
    )
    packed = Batches(
        padded(2, 8, "no")["input_ids"],
        {
            "3 packed samples of length 11": padded(3, 11, "no")["input_ids"],
            "1 packed sample of length 5": padded(1, 5, "no")["input_ids"],
        },
        padded(4, 9, "no")["input_ids"],
    )
    return [masked, packed]


def seq2seq_batches(vocabulary: int, multiple: int = 1) -> list[Batches]:
    """Padded texts, and the beginnings of their answers, of other lengths."""

    def batch(size: int, length: int, answer: int, padding: Padding) -> dict[str, Tensor]:
        answers = _text(vocabulary, size, answer, "no")["input_ids"]
        return {**_text(vocabulary, size, length * multiple, padding), "decoder_input_ids": answers}

    others = {
        "3 texts of length 8, not padded": batch(3, 8, 6, "no"),
        "2 texts of length 11 and answers of 7": batch(2, 11, 7, "no"),
        "3 texts of length 13, padded on the right": batch(3, 13, 4, "right"),
        "4 texts of length 7, padded on the left": batch(4, 7, 7, "left"),
        "1 text of length 5": batch(1, 5, 3, "no"),
    }
    return [Batches(batch(2, 8, 6, "right"), others, batch(4, 9, 5, "right"))]


def _text(vocabulary: int, batch: int, length: int, padding: Padding) -> dict[str, Tensor]:
    """Random texts that end with END. The first is as long as the batch, the others shorter if there is padding."""
    ids = torch.randint(FIRST_WORD, vocabulary, (batch, length))
    mask = torch.ones_like(ids)
    for row in range(batch):
        spaces = 0 if padding == "no" else min(2 * row, length // 2)
        start, stop = (spaces, length) if padding == "left" else (0, length - spaces)
        ids[row, stop - 1] = END
        ids[row, :start], ids[row, stop:] = PAD, PAD
        mask[row, :start], mask[row, stop:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}
