"""The cross entropy of the scores of a linear layer, a block of tokens at a time.

The scores of a large vocabulary take more memory than everything else in the last partition. Here the last linear layer
passes its input on, with its parameters, and the loss multiplies both: once in forward and again in backward, so that
only the scores of one block exist at a time. The blocks depend on the tokens of a micro-batch and on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear

from gpipe_cli.values import FACTORS, IGNORED_LABEL, check_whole_number

AUTO, NONE = "auto", "none"
_BLOCK_SCORES = 2**25
"""Scores in a block that gpipe chooses: 128 MiB in float32."""
_LEAST_BLOCK = 256
"""Tokens in such a block: matrices with fewer rows multiply slowly."""
_SCORE_BYTES = 12
"""What a score takes at the worst moment: its own float32, its logarithm of a probability, and a gradient."""
_SAVING = 0.1


@final
@dataclass(frozen=True)
class Factors:
    """The parameters that scores are to be computed with, from what the last linear layer passed on."""

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    """In which the layer would compute."""
    block: int
    """Tokens in a block."""

    def __iter__(self) -> Iterator[Tensor]:
        yield self.weight
        if self.bias is not None:
            yield self.bias

    def scores(self, hidden: Tensor) -> Tensor:
        """As the loss sees them: in float32 if the layer computes in half precision."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        scores = linear(hidden.to(self.dtype), self.weight.to(self.dtype), bias)
        return scores.float() if scores.dtype.itemsize < torch.float32.itemsize else scores


class BlockedLinear(nn.Linear):
    """A linear layer whose scores the loss computes."""

    block: int

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        # The meta device has no autocast.
        autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else self.weight.dtype
        passed = input.view_as(input)  # an object of its own
        setattr(passed, FACTORS, Factors(self.weight, self.bias, dtype, self.block))
        return passed


def factors_of(output: Any) -> Factors | None:
    """What the output is to be multiplied with; None for scores."""
    return getattr(output, FACTORS, None)


def blocked_linear(model: nn.Module) -> BlockedLinear | None:
    return next((part for part in model.modules() if isinstance(part, BlockedLinear)), None)


def check_block(block: Any) -> None:
    if block not in (AUTO, NONE):
        check_whole_number("loss.block", block, least=1)


def automatic_block(last: nn.Linear, tokens: int) -> int | None:
    """The size of blocks that save more than a tenth of what the layer, its training and its scores take."""
    block = max(_LEAST_BLOCK, 2 ** ((_BLOCK_SCORES // last.out_features).bit_length() - 1))
    # With a gradient and two moments.
    resident = last.weight.nbytes * (4 if last.weight.requires_grad else 1)
    needed = resident + _SCORE_BYTES * last.out_features * tokens
    saved = _SCORE_BYTES * last.out_features * (tokens - block)
    return block if saved > _SAVING * needed else None


def blocked_cross_entropy(hidden: Tensor, target: Tensor, factors: Factors, label_smoothing: float) -> Tensor:
    """The mean over the tokens that are not ignored; 0 if there are none. hidden: [tokens, width]."""
    if len(target) <= factors.block:
        return cross_entropy(factors.scores(hidden), target, label_smoothing=label_smoothing)
    loss: Tensor = _BlockedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, factors.weight, factors.bias, target, factors, label_smoothing
    )
    return loss


class _BlockedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        factors: Factors,
        smoothing: float,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.dtype, ctx.block, ctx.smoothing = factors.dtype, factors.block, smoothing
        factors = _cast(weight, bias, ctx)
        losses = [
            cross_entropy(factors.scores(part), wanted, label_smoothing=smoothing, reduction="sum")
            for part, wanted in _blocks(hidden, target, factors.block)
        ]
        return torch.stack(losses).sum() / _scored(target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target = ctx.saved_tensors
        factors, needed = _cast(weight, bias, ctx), ctx.needs_input_grad
        # In float32 at least: a sum over blocks in half precision would lose digits that one product keeps.
        total = torch.promote_types(ctx.dtype, torch.float32)
        of_weight = weight.new_zeros(weight.shape, dtype=total) if needed[1] else None
        of_bias = bias.new_zeros(bias.shape, dtype=total) if needed[2] else None
        of_hidden = torch.empty_like(hidden) if needed[0] else None
        scale = gradient / _scored(target)
        first = 0
        for part, wanted in _blocks(hidden, target, ctx.block):
            of_scores = _gradient_of_scores(factors.scores(part), wanted, ctx.smoothing, scale).to(ctx.dtype)
            if of_hidden is not None:
                of_hidden[first : first + len(part)] = of_scores @ factors.weight
            if of_weight is not None:
                _add_product(of_weight, of_scores.t(), part.to(ctx.dtype))
            if of_bias is not None:
                of_bias += of_scores.sum(0)
            first += len(part)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _cast(weight: Tensor, bias: Tensor | None, ctx: Any) -> Factors:
    """Once for all blocks."""
    cast = None if bias is None else bias.to(ctx.dtype)
    return Factors(weight.to(ctx.dtype), cast, ctx.dtype, ctx.block)


def _blocks(hidden: Tensor, target: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(torch.split(hidden, size), torch.split(target, size), strict=True)


def _scored(target: Tensor) -> Tensor:
    return (target != IGNORED_LABEL).sum().clamp(min=1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _gradient_of_scores(scores: Tensor, target: Tensor, smoothing: float, scale: Tensor) -> Tensor:
    """That of the cross entropy, which is the probabilities minus those that are wanted."""
    gradient = scores.softmax(1)
    scored = (target != IGNORED_LABEL).unsqueeze(1)
    places = target.unsqueeze(1) * scored
    gradient.scatter_(1, places, gradient.gather(1, places) - (1 - smoothing))
    if smoothing:
        gradient -= smoothing / gradient.shape[1]
    return gradient.mul_(scored * scale)


def blocks_of(hidden: Tensor, target: Tensor, factors: Factors) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores [1, tokens, vocabulary] and targets [1, tokens], a block at a time."""
    for part, wanted in _blocks(hidden.flatten(0, -2), target.flatten(), factors.block):
        yield factors.scores(part).unsqueeze(0), wanted.unsqueeze(0)
