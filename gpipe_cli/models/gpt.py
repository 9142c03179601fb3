"""A decoder-only transformer like GPT-2.

A layer is the embedding, a block or the head. The head may share its matrix with the embedding, in the first and the
last partition; the pipeline then sums the gradients of both.

Where samples say the place of each token in its document, a token attends to its own document only; blocks then pass on
the number of the document beside the activations.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from gpipe_cli.errors import ConfigError
from gpipe_cli.values import check_fraction, check_whole_number

_INIT_STD = 0.02  # as in GPT-2
_Activations: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""[samples, tokens, width], and in packed samples the number of the document of each token, [samples, tokens]."""


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

    def forward(self, input: Tensor | dict[str, Tensor]) -> _Activations:
        if isinstance(input, Tensor):
            places = torch.arange(input.shape[1], device=input.device)
            embedded: Tensor = self.dropout(self.tokens(input) + self.positions(places))
            return embedded
        tokens, places = _packed(**input)
        return self.dropout(self.tokens(tokens) + self.positions(places)), (places == 0).cumsum(1)


def _packed(input_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The arguments of a packed sample; TypeError for other ones, as in any forward."""
    return input_ids, position_ids


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

    def forward(self, activations: _Activations) -> _Activations:
        input, document = _divided(activations)
        input = input + self.attention(self.attention_norm(input), document)
        output: Tensor = input + self.perceptron(self.perceptron_norm(input))
        return output if document is None else (output, document)


@final
class Attention(nn.Module):
    """Causal self-attention: each token attends to itself and those before it, in the same document."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.split = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input: Tensor, document: Tensor | None) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.split(input).chunk(3, dim=-1)
        )
        dropout = self.dropout.p if self.training else 0.0
        mask = None
        if document is not None:
            mask = (document.unsqueeze(1) == document.unsqueeze(2)).tril().unsqueeze(1)
        attended = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
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

    def forward(self, activations: _Activations) -> Tensor:
        output: Tensor = self.scores(self.norm(_divided(activations)[0]))
        return output


def _divided(activations: _Activations) -> tuple[Tensor, Tensor | None]:
    return (activations, None) if isinstance(activations, Tensor) else activations
