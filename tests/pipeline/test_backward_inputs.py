"""backward(inputs=...) and autograd.grad give what they are asked for, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe

CHECKPOINTS = ["always", "except_last", "never"]
pytestmark = pytest.mark.timeout(60)


def three_linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()


def leaves_of(model: nn.Module, input: Tensor) -> dict[str, Tensor]:
    return {"input": input, **dict(model.named_parameters())}


CHOICES = [
    ["0.weight"],
    ["2.bias"],
    ["4.weight"],
    ["0.weight", "2.weight", "4.bias"],
    ["input"],
    ["input", "2.weight"],
    ["input", "0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"],
]


def compare(
    differentiate: Callable[[Tensor, list[Tensor]], None], names: list[str], checkpoint: str, computed: bool
) -> None:
    input = torch.linspace(-1, 1, 18).double().reshape(6, 3)
    results = []
    for build in (
        lambda model: model,
        lambda model: GPipe(model, [1, 2, 2], chunks=3, checkpoint=checkpoint),
    ):
        module = build(three_linears())
        leaf = input.clone().requires_grad_()
        leaves = leaves_of(module, leaf)
        loss = module(leaf * 1.5 if computed else leaf).pow(2).sum()
        differentiate(loss, [leaves[name] for name in names])
        results.append({name: leaf.grad for name, leaf in leaves.items()})
        if isinstance(module, GPipe):
            module.close()
    plain, piped = results
    for name, expected in plain.items():
        assert (piped[name] is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(piped[name], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("names", CHOICES, ids=" ".join)
@pytest.mark.parametrize("computed", [False, True])
def test_backward_fills_the_inputs_it_is_given_and_no_other(
    names: list[str], checkpoint: str, computed: bool
) -> None:
    """`loss.backward(inputs=[weight])` left weight.grad None, without a word."""
    compare(lambda loss, inputs: loss.backward(inputs=inputs), names, checkpoint, computed)


@pytest.mark.parametrize("names", CHOICES, ids=" ".join)
def test_backward_fills_them_again_where_the_graph_is_kept(names: list[str]) -> None:
    def twice(loss: Tensor, inputs: list[Tensor]) -> None:
        loss.backward(inputs=inputs, retain_graph=True)
        loss.backward(inputs=inputs)

    compare(twice, names, "except_last", False)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("names", CHOICES, ids=" ".join)
def test_grad_returns_the_gradients_and_fills_none(names: list[str], checkpoint: str) -> None:
    def grad(loss: Tensor, inputs: list[Tensor]) -> None:
        gradients = torch.autograd.grad(loss, inputs)
        for leaf, gradient in zip(inputs, gradients, strict=True):
            leaf.grad = gradient

    compare(grad, names, checkpoint, False)


def test_a_parameter_that_is_not_asked_for_keeps_its_gradient() -> None:
    with GPipe(three_linears(), [1, 4], chunks=2) as pipe:
        before = torch.ones(3, 3).double()
        pipe[4].weight.grad = before
        pipe(torch.ones(4, 3).double()).sum().backward(inputs=[pipe[0].weight])
        assert pipe[4].weight.grad is before
        assert torch.equal(before, torch.ones(3, 3).double())
        assert pipe[0].weight.grad.any()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_every_schedule_fills_what_it_is_asked_for(schedule: str) -> None:
    devices = ["cpu"] * 2
    input = torch.ones(4, 3).double()
    for first, second in itertools.pairwise(["0.weight", "2.weight", "4.weight"]):
        plain = three_linears()
        named = dict(plain.named_parameters())
        plain(input).sum().backward(inputs=[named[first], named[second]])
        with GPipe(three_linears(), [2, 3], devices=devices, chunks=2, schedule=schedule) as pipe:
            mine = dict(pipe.named_parameters())
            pipe(input).sum().backward(inputs=[mine[first], mine[second]])
            for name, leaf in named.items():
                assert (mine[name].grad is None) == (leaf.grad is None), name
                if leaf.grad is not None:
                    torch.testing.assert_close(mine[name].grad, leaf.grad, rtol=1e-12, atol=1e-14)


def test_a_tied_parameter_is_filled_too() -> None:
    models = [three_linears(), three_linears()]
    for model in models:
        model[4].weight = model[0].weight
    input = torch.ones(4, 3).double()
    models[0](input).sum().backward(inputs=[models[0][0].weight])
    with GPipe(models[1], [2, 3], chunks=2) as pipe:
        pipe(input).sum().backward(inputs=[models[1][0].weight])
    torch.testing.assert_close(models[1][0].weight.grad, models[0][0].weight.grad, rtol=1e-12, atol=1e-14)
    assert models[1][2].weight.grad is None
