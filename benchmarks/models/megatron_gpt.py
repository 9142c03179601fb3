"""GPT as Megatron-LM ran it in 2022: 16-bit weights, attention in separate kernels, one matrix for both ends.

Only its operations matter here: it is never trained, so nothing initializes it.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

DROPOUT = 0.1


def build(hidden: int, layers: int, heads: int, sequence: int, vocabulary: int) -> nn.Sequential:
    tokens = nn.Embedding(vocabulary, hidden)
    blocks = [Block(hidden, heads) for _ in range(layers)]
    return nn.Sequential(Embedding(tokens, sequence), *blocks, Head(tokens, hidden)).half()


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """In 32 bits, as Megatron computes it."""
    losses: Tensor = _CrossEntropy.apply(logits.float().flatten(0, 1), target.t().flatten())  # type: ignore[no-untyped-call]
    return losses.mean()


class _CrossEntropy(torch.autograd.Function):
    """Step by step, since with tensor parallelism the ranks exchange maxima and sums between the steps."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        below = logits - logits.max(-1, keepdim=True).values
        chosen = below.gather(-1, target[:, None])[:, 0]
        shares = below.exp()
        total = shares.sum(-1)
        ctx.save_for_backward(shares.div_(total[:, None]), target)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        shares, target = ctx.saved_tensors
        shares[torch.arange(len(target), device=target.device), target] -= 1.0
        return shares.mul_(gradients[0][:, None]), None


@final
class Embedding(nn.Module):
    def __init__(self, tokens: nn.Embedding, sequence: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = nn.Embedding(sequence, tokens.embedding_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        # From here on a value has its tokens first, then its rows.
        positions = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        return functional.dropout(self.tokens(tokens.t()) + self.positions(positions), DROPOUT)


@final
class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.split, self.merge = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.widen, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, input: Tensor) -> Tensor:
        attended = self.merge(self._attention(self.split(self.attention_norm(input))))
        input = input + functional.dropout(attended, DROPOUT)
        widened = functional.gelu(self.widen(self.perceptron_norm(input)), approximate="tanh")
        output: Tensor = input + functional.dropout(self.narrow(widened), DROPOUT)
        return output

    def _attention(self, split: Tensor) -> Tensor:
        tokens, rows, _ = split.shape
        # Views of one matrix for queries, keys and values; the softmax also scales and masks the scores.
        query, key, value = (
            part.reshape(tokens, rows * self.heads, -1).transpose(0, 1)
            for part in split.unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)
        )
        shares = functional.dropout(torch.bmm(query, key.transpose(1, 2)).softmax(-1), DROPOUT)
        return torch.bmm(shares, value).unflatten(0, (rows, self.heads)).permute(2, 0, 1, 3).flatten(2)


@final
class Head(nn.Module):
    def __init__(self, tokens: nn.Embedding, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.scores = nn.Linear(hidden, tokens.num_embeddings, bias=False)
        self.scores.weight = tokens.weight

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.scores(self.norm(input))
        return output
