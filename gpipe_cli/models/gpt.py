"""A decoder-only transformer like GPT-2.

A layer is the embedding, a block or the head. The head may share its matrix with the embedding, in the first and the
last partition; the pipeline then sums the gradients of both.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from gpipe_cli.errors import ConfigError
from gpipe_cli.values import check_fraction, check_whole_number

_INIT_STD = 0.02  # as in GPT-2


def build(
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    context: int | None = None,
    vocabulary: int | None = None,
    dropout: float = 0.0,
    tied: bool = True,
    num_classes: int = 256,
    input_shape: tuple[int, ...] = (32,),
) -> nn.Sequential:
    """Return an embedding, `depth` blocks of `width` channels with `heads` heads, and a head.

    context: the number of positions; None takes the length of a sample.
    vocabulary: the number of tokens; None takes that of the data, which is num_classes.
    tied: whether head and embedding share a matrix.
    """
    for key, value in (("width", width), ("depth", depth), ("heads", heads)):
        check_whole_number(f"model.{key}", value, least=1)
    check_fraction("model.dropout", dropout)
    if width % heads:
        raise ConfigError(f"model.heads={heads}: must divide model.width={width}")
    context = _context(context, input_shape)
    vocabulary = _vocabulary(vocabulary, num_classes)
    embedding = Embedding(vocabulary, width, context, dropout)
    layers: OrderedDict[str, nn.Module] = OrderedDict(embedding=embedding)
    for number in range(depth):
        layers[f"block{number}"] = Block(width, heads, dropout, depth)
    layers["head"] = LanguageModelHead(width, vocabulary, embedding.tokens if tied else None)
    return nn.Sequential(layers)


def _context(context: int | None, input_shape: tuple[int, ...]) -> int:
    if len(input_shape) != 1:
        raise ConfigError(
            f"model: gpt expects sequences of tokens, but the data has shape {list(input_shape)}"
        )
    (tokens,) = input_shape
    if context not in (None, tokens):
        raise ConfigError(
            f"model.context={context}: samples have {tokens} tokens; set data.context={context}"
        )
    return tokens


def _vocabulary(vocabulary: int | None, num_classes: int) -> int:
    check_whole_number("model.num_classes", num_classes, least=1)
    if vocabulary is None:
        return num_classes
    check_whole_number("model.vocabulary", vocabulary, least=1)
    if vocabulary < num_classes:
        raise ConfigError(
            f"model.vocabulary={vocabulary}: must be at least {num_classes}, the number of tokens in the data"
        )
    return vocabulary


@final
class Embedding(nn.Module):
    """Embeds each token and its position."""

    def __init__(self, vocabulary: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        for part in (self.tokens, self.positions):
            nn.init.normal_(part.weight, std=_INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        output: Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        return output


@final
class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection around it."""

    def __init__(self, width: int, heads: int, dropout: float, depth: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.perceptron_norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            OrderedDict(
                widen=nn.Linear(width, 4 * width),
                activation=nn.GELU(approximate="tanh"),
                narrow=nn.Linear(4 * width, width),
                dropout=nn.Dropout(dropout),
            )
        )
        self._initialize(depth)

    def _initialize(self, depth: int) -> None:
        for path, part in self.named_modules():
            if isinstance(part, nn.Linear):
                # Every block adds to the residual stream twice, so its additions must shrink with the number of blocks.
                is_last_of_branch = path.endswith(("narrow", "merge"))
                nn.init.normal_(
                    part.weight, std=_INIT_STD / math.sqrt(2 * depth) if is_last_of_branch else _INIT_STD
                )
                nn.init.zeros_(part.bias)

    def forward(self, input: Tensor) -> Tensor:
        input = input + self.attention(self.attention_norm(input))
        output: Tensor = input + self.perceptron(self.perceptron_norm(input))
        return output


@final
class Attention(nn.Module):
    """Causal self-attention: each token attends to itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.split = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.split(input).chunk(3, dim=-1)
        )
        dropout = self.dropout.p if self.training else 0.0
        attended = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        output: Tensor = self.dropout(self.merge(attended.transpose(1, 2).flatten(2)))
        return output


@final
class LanguageModelHead(nn.Module):
    """Scores every token of the vocabulary."""

    def __init__(self, width: int, vocabulary: int, tied_to: nn.Embedding | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)
        if tied_to is None:
            nn.init.normal_(self.scores.weight, std=_INIT_STD)
        else:
            self.scores.weight = tied_to.weight

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.scores(self.norm(input))
        return output
