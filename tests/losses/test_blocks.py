"""Scores that the loss computes block by block give the loss, metrics and gradients of scores computed at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.build.model import use_blocks
from gpipe_cli.errors import ConfigError
from gpipe_cli.losses.blocks import BlockedLinear
from gpipe_cli.losses.cross_entropy import CrossEntropy, TokenCrossEntropy
from gpipe_cli.models.gpt import LanguageModelHead, build
from gpipe_cli.pipeline.gpipe import plain_pipe

WIDTH, VOCABULARY = 8, 37


def model(dtype: torch.dtype = torch.double, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=bias)).to(dtype)


def batch(dtype: torch.dtype = torch.double) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    target = torch.randint(VOCABULARY, (4, 7))
    target[torch.rand(4, 7) < 0.3] = -100
    target[:2] = -100  # the first micro-batch of two scores nothing
    return torch.randn(4, 7, WIDTH, dtype=dtype), target


def blocked(whole: nn.Sequential, size: int = 5) -> nn.Sequential:
    model = copy.deepcopy(whole)
    use_blocks(model, TokenCrossEntropy(block=size), 1)
    return model


def step(module: nn.Sequential, loss: TokenCrossEntropy, dtype: torch.dtype) -> list[Tensor]:
    """The loss, and the gradients of all parameters and of the input."""
    input, target = batch(dtype)
    input.requires_grad_()
    total = plain_pipe(module, chunks=2).step(input, target, loss, key=0)
    gradients = [tensor.grad for tensor in (*module.parameters(), input)]
    assert all(gradient is not None for gradient in gradients)
    return [total, *gradients]  # type: ignore[list-item]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.double, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2**-7)]
)
def test_blocks_give_the_loss_and_the_gradients_of_the_whole(
    dtype: torch.dtype, tolerance: float, smoothing: float, bias: bool
) -> None:
    loss, whole = TokenCrossEntropy(smoothing), model(dtype, bias)
    ours = step(blocked(whole), loss, dtype)
    for own, expected in zip(ours, step(whole, loss, dtype), strict=True):
        assert (own - expected).abs().max() <= tolerance * expected.abs().max()


def test_the_head_gets_a_gradient_of_zeros_from_a_mini_batch_that_scores_nothing() -> None:
    """Without one, an optimizer would update it in another way than it does without blocks."""
    module = blocked(model())
    input, _ = batch()
    target = torch.full((4, 7), -100)
    assert plain_pipe(module, chunks=2).step(input, target, TokenCrossEntropy(), key=0) == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in module.parameters())


def test_metrics_are_those_of_the_whole() -> None:
    whole, loss = model(), TokenCrossEntropy()
    input, target = batch()
    assert loss.measure(blocked(whole)(input), target) == pytest.approx(loss.measure(whole(input), target))


def test_a_pipe_computes_the_loss_alone_without_gradients() -> None:
    whole, loss = model(), TokenCrossEntropy()
    input, target = batch()
    module = blocked(whole)
    with GPipe(module, [1, 1], devices=["cpu", "cpu"], chunks=2) as pipe:
        assert float(pipe.loss(input, target, loss)) == pytest.approx(loss(whole(input), target).item())
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("balance", "options"),
    [
        ([4], {}),
        ([1, 3], {"schedule": "1f1b", "checkpoint": "always"}),
        ([2, 1, 1], {"schedule": "zero_bubble", "checkpoint": "never"}),
        ([3, 1], {"schedule": "gpipe", "checkpoint": "except_last"}),
    ],
)
def test_no_bit_depends_on_split_schedule_or_checkpoint_mode(
    balance: list[int], options: dict[str, Any], tied: bool
) -> None:
    torch.manual_seed(0)
    alone = blocked(build(width=8, depth=2, heads=2, tied=tied, num_classes=VOCABULARY, input_shape=(6,)))
    module = copy.deepcopy(alone)
    tokens = torch.randint(VOCABULARY, (5, 7))
    input, target = tokens[:, :-1], tokens[:, 1:]
    expected = plain_pipe(alone, chunks=2).step(input, target, TokenCrossEntropy(), key=0)
    with GPipe(module, balance, devices=["cpu"] * len(balance), chunks=2, **options) as pipe:
        assert torch.equal(pipe.step(input, target, TokenCrossEntropy(), key=0), expected)
    for own, other in zip(module.parameters(), alone.parameters(), strict=True):
        assert own.grad is not None and other.grad is not None and torch.equal(own.grad, other.grad)


@pytest.mark.parametrize(
    ("vocabulary", "tokens", "block"),
    [(131_072, 4096, 256), (32_000, 4096, 1024), (32_000, 1024, None), (256, 65_536, None)],
)
def test_blocks_are_chosen_where_they_save_memory(vocabulary: int, tokens: int, block: int | None) -> None:
    with torch.device("meta"):
        module = nn.Sequential(LanguageModelHead(64, vocabulary, None))
    use_blocks(module, TokenCrossEntropy(), tokens)
    scores = module[0].scores
    assert isinstance(scores, nn.Linear)
    assert (scores.block if isinstance(scores, BlockedLinear) else None) == block


class Capped(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).tanh()


def test_a_model_that_ends_otherwise_is_refused_or_stays_whole() -> None:
    module = nn.Sequential(Capped(WIDTH, VOCABULARY))
    use_blocks(module, TokenCrossEntropy(), 10**6)
    assert type(module[0]) is Capped
    with pytest.raises(
        ConfigError, match=r"^loss\.block=7: is for a model that returns the output of an nn.Linear"
    ):
        use_blocks(module, TokenCrossEntropy(block=7), 10**6)


def test_only_the_loss_of_tokens_takes_blocks() -> None:
    module = model()
    use_blocks(module, CrossEntropy(), 10**6)
    assert type(module[-1]) is nn.Linear
    with pytest.raises(ConfigError, match=r"loss\.block=0: must be a whole number of at least 1"):
        TokenCrossEntropy(block=0)
