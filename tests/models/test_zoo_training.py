"""Our own models train in a pipe as they do alone: two steps, every parameter and gradient, three modes.

U-Net's skips go far over partitions, GPT's tied matrix is used in the first and in the last, AmoebaNet's cells
hand on pairs. Dropout is on: masks are those of the plain pipe too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.losses.cross_entropy import CrossEntropy, TokenCrossEntropy
from gpipe_cli.losses.dice import Dice
from gpipe_cli.models import amoebanetd, gpt, mlp, unet
from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.sequential import partition_uniform

Task = tuple[nn.Sequential, Tensor, Tensor, Callable[..., Tensor]]
CHUNKS = 3


def images() -> tuple[Tensor, Tensor]:
    """Two for each micro-batch: AmoebaNet ends in single pixels, of which batch norm needs two."""
    return torch.randn(6, 3, 16, 16), torch.randint(3, (6,))


def long_skips() -> Task:
    model = unet.build(3, 2, 4, dropout=0.2, num_classes=3, input_shape=(3, 17, 20))
    return model, torch.randn(4, 3, 17, 20), torch.randint(3, (4, 17, 20)), Dice()


def standard_unet() -> Task:
    model = unet.build_standard(2, 4, num_classes=3, input_shape=(3, 16, 16))
    return model, torch.randn(4, 3, 16, 16), torch.randint(3, (4, 16, 16)), CrossEntropy()


def untied_gpt() -> Task:
    model = gpt.build(16, 3, 2, dropout=0.1, tied=False, num_classes=11, input_shape=(9,))
    return model, torch.randint(11, (4, 9)), torch.randint(11, (4, 9)), TokenCrossEntropy()


def tied_gpt() -> Task:
    model = gpt.build(16, 3, 2, dropout=0.1, num_classes=11, input_shape=(9,))
    return model, torch.randint(11, (4, 9)), torch.randint(11, (4, 9)), TokenCrossEntropy()


def pairs() -> Task:
    return amoebanetd.build(3, 3, 16, input_shape=(3, 16, 16)), *images(), CrossEntropy()


def perceptron() -> Task:
    return mlp.build(8, 4, 3, input_shape=(3, 16, 16)), *images(), CrossEntropy()


def two_steps(pipe: Any, input: Tensor, target: Tensor, loss: Callable[..., Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for key in range(2):
        optimizer.zero_grad()
        losses.append(pipe.train().step(input, target, loss, key=key))
        optimizer.step()
    return losses


def tensors_of(model: nn.Module, losses: list[Tensor]) -> dict[str, Tensor]:
    """Losses, parameters, buffers and the gradients of the last step, by name."""
    gradients = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert missing == []
    by_step = {f"loss {step}": loss for step, loss in enumerate(losses)}
    tensors = {**model.state_dict(), **gradients, **by_step}
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor is not None}


def runs(task: Callable[[], Task]) -> Any:
    """Yield each pipe's description, the tensors of a plain pipe, and those of the pipe."""
    torch.manual_seed(0)
    model, input, target, loss = task()
    start = copy.deepcopy(model.state_dict())
    expected = tensors_of(model, two_steps(plain_pipe(model, chunks=CHUNKS), input, target, loss))
    for partitions in (2, 4):
        balance = [len(part) for part in partition_uniform(model, partitions)]
        for checkpoint in ("always", "except_last", "never"):
            model.load_state_dict(start)
            model.zero_grad()
            devices = ["cpu"] * partitions
            with GPipe(model, balance, devices=devices, chunks=CHUNKS, checkpoint=checkpoint) as pipe:
                actual = tensors_of(model, two_steps(pipe, input, target, loss))
            yield (balance, checkpoint), expected, actual


@pytest.mark.parametrize(
    "task",
    [
        long_skips,
        standard_unet,
        untied_gpt,
        tied_gpt,
        pytest.param(pairs, marks=pytest.mark.slow),
        perceptron,
    ],
)
def test_two_steps_in_a_pipe_give_the_bits_of_two_steps_alone(task: Callable[[], Task]) -> None:
    for pipe, expected, actual in runs(task):
        assert expected.keys() == actual.keys()
        assert [name for name in expected if not torch.equal(expected[name], actual[name])] == [], pipe
        if task is tied_gpt:  # the head is in another partition than the embedding
            assert torch.equal(actual["embedding.tokens.weight"], actual["head.scores.weight"])
