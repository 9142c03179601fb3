from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpipe_cli.pipeline.gpipe import GPipe, plain_pipe
from gpipe_cli.pipeline.pipe import Pipe


def gradients(pipe: Pipe) -> dict[str, Tensor]:
    torch.manual_seed(0)
    input, target = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
    with pipe:
        pipe.step(input, target, cross_entropy, key=1)
    return {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}


def convolution() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


@pytest.mark.parametrize("balance", [[1, 3], [2, 2], [3, 1], [1, 1, 1, 1]])
def test_a_convolution_alone_in_a_worker_gives_the_bits_of_the_callers_thread_count(
    balance: list[int],
) -> None:
    """torch hands its thread count to a new thread only at that thread's first parallel loop of its own; a
    worker that began with a convolution ran it on every core, and its weight gradient had other bits."""
    expected = gradients(plain_pipe(convolution()))
    actual = gradients(GPipe(convolution(), balance, devices=["cpu"] * len(balance)))
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name
