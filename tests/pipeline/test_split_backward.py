"""Backward in two halves, and the schedule that is made of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_cli import GPipe
from gpipe_cli.pipeline.boundary import GradSink, PartitionInput, enter, roots_of
from gpipe_cli.pipeline.split_backward import SplitBackward
from gpipe_cli.pytree import SINGLE


def split(layer: nn.Module, input: Tensor) -> tuple[SplitBackward, GradSink]:
    sink = GradSink((True,))
    ((entered,),) = enter([PartitionInput((input,), (True,), SINGLE, value_count=1)], sink)
    assert entered is not None
    output = layer(entered)
    (root,) = roots_of([output])
    return SplitBackward([(root, torch.ones_like(output))], sink), sink


LAYERS = {
    "linear": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    "convolution": nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten()
    ),
    "attention": nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), nn.Flatten()
    ),
    "norm": nn.Sequential(nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4, bias=False)),
    "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_first_half_gives_the_inputs_gradient_and_the_second_the_weights(name: str) -> None:
    torch.manual_seed(0)
    layer = copy.deepcopy(LAYERS[name]).double()
    input = torch.randn(5, 4).double()
    halves, sink = split(layer, input)
    assert halves.possible
    halves.run_input_half()
    (gradient,) = sink.take()
    assert [leaf.grad for leaf in layer.parameters()] == [None] * len(list(layer.parameters()))
    halves.run_weight_half(keep_graph=False)
    mine = [leaf.grad for leaf in layer.parameters()]
    layer.zero_grad()
    leaf_input = input.clone().requires_grad_()
    layer(leaf_input).sum().backward()
    theirs = [leaf.grad for leaf in layer.parameters()]
    for left, right in zip([gradient, *mine], [leaf_input.grad, *theirs], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)


def test_a_weight_used_twice_makes_a_split_impossible() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, input: Tensor) -> Tensor:
            return self.linear(self.linear(input))

    halves, _ = split(Twice(), torch.ones(2, 4))
    assert not halves.possible
    plain = nn.Sequential(nn.Linear(4, 4), Twice())
    with GPipe(copy.deepcopy(plain), [1, 1], chunks=2, schedule="zero_bubble") as pipe:
        pipe.step(torch.ones(4, 4), torch.zeros(4, 4), functional.mse_loss)
    functional.mse_loss(plain(torch.ones(4, 4)), torch.zeros(4, 4)).backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_loss_backward_and_retain_graph_go_through_both_halves() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    input = torch.randn(4, 3).double().requires_grad_()
    with GPipe(model, [1, 2], chunks=2, schedule="zero_bubble") as pipe:
        output = pipe(input)
        output.sum().backward(retain_graph=True)
        once = [leaf.grad.clone() for leaf in (input, *pipe.parameters())]
        output.sum().backward()
        for leaf, first in zip((input, *pipe.parameters()), once, strict=True):
            torch.testing.assert_close(leaf.grad, 2 * first, rtol=1e-12, atol=1e-14)
