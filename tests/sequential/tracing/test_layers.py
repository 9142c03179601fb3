"""What a model returns is a tuple inside a pipe and has its own containers outside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_cli import GPipe
from gpipe_cli.errors import ConfigError
from gpipe_cli.pipeline.gpipe import plain_pipe
from gpipe_cli.pytree import flatten
from gpipe_cli.sequential import to_sequential


class Heads(nn.Module):
    """Two outputs in training, one in evaluation; `give` makes the output of training."""

    def __init__(self, give: Any = dict) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.out, self.aux = nn.Linear(4, 2), nn.Linear(4, 2)
        self.give = give

    def forward(self, input: Tensor) -> Any:
        value = self.body(input)
        return self.give(out=self.out(value), aux=self.aux(value)) if self.training else {"only": value}


class Naming(nn.Module):
    """Childless, so a leaf: the dict is the value of a node instead of a literal in the graph."""

    def forward(self, input: Tensor) -> dict[str, Tensor]:
        return {"twice": input * 2, "half": input / 2}


def summed(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return sum((value - target).square().mean() for value in output.values())  # type: ignore[return-value]


def assert_equal_dicts(given: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(given) == list(expected)
    assert all(torch.equal(given[name], expected[name]) for name in expected)


@pytest.mark.parametrize("model", [Heads(), nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2), Naming())])
@pytest.mark.parametrize("training", [True, False])
def test_sequence_and_pipe_return_the_dict(model: nn.Module, training: bool) -> None:
    original, input = model.train(training), torch.randn(6, 4)
    sequence = to_sequential(copy.deepcopy(original), input)
    expected = original(input)
    assert_equal_dicts(sequence(input), expected)
    balance = [1, len(sequence) - 1]
    with GPipe(sequence, balance, devices=["cpu"] * 2, chunks=1) as pipe:
        assert_equal_dicts(pipe(input), expected)
        joined = GPipe(sequence, balance, devices=["cpu"] * 2, chunks=3)(input)
        assert all(torch.allclose(joined[name], expected[name], atol=1e-6) for name in expected)
    assert isinstance(sequence[-1](sequence[:-1](input)), tuple)


class Longer(nn.Module):
    """Ends earlier in evaluation, and returns outputs in a different order than it computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:
        first = self.first(input)
        second = self.second(first)
        return (second, first, self.third(second).relu()) if self.training else (second, first)


@pytest.mark.parametrize("training", [True, False])
def test_layers_after_the_end_of_a_mode_pass_its_outputs_on(training: bool) -> None:
    original, input = Longer().train(training), torch.randn(2, 4)
    sequence = to_sequential(original, input)
    assert len(sequence) == 3
    assert all(torch.equal(*pair) for pair in zip(sequence(input), original(input), strict=True))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_the_loss_of_a_step_receives_the_dict(schedule: str) -> None:
    original, input, target = Heads().train(), torch.randn(6, 4), torch.randn(6, 2)
    sequence = to_sequential(copy.deepcopy(original), input)
    plain = plain_pipe(to_sequential(original, input), chunks=2)
    expected = plain.step(input, target, summed, key=0, return_output=True)
    with GPipe(sequence, [2, len(sequence) - 2], devices=["cpu"] * 2, chunks=2, schedule=schedule) as pipe:
        loss, output = pipe.step(input, target, summed, key=0, return_output=True)
    assert torch.equal(loss, expected[0])
    assert isinstance(output, dict) and isinstance(expected[1], dict)
    assert_equal_dicts(output, expected[1])
    for reference, parameter in zip(original.parameters(), sequence.parameters(), strict=True):
        assert (
            reference.grad is not None
            and parameter.grad is not None
            and torch.equal(reference.grad, parameter.grad)
        )


@pytest.mark.parametrize(
    "give",
    [
        lambda out, aux: [out, aux],
        lambda out, aux: (out, None),
        lambda out, aux: {"out": out, "all": [aux, (out, 3)]},
        lambda out, aux: (out, out),
    ],
)
def test_the_output_keeps_its_containers(give: Any) -> None:
    original, input = Heads(give).train(), torch.randn(4, 4)
    expected = original(input)
    sequence = to_sequential(copy.deepcopy(original), input)
    with GPipe(sequence, [1, len(sequence) - 1], devices=["cpu"] * 2) as pipe:
        for actual in (sequence(input), pipe(input)):
            (tensors, template), (expected_tensors, expected_template) = (
                flatten(output, "output") for output in (actual, expected)
            )
            assert template == expected_template
            assert all(map(torch.equal, tensors, expected_tensors))


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda out, aux: {}, r"the model returns a dict without tensors; a model must return tensors"),
        (lambda out, aux: 3, r"the model returns a int without tensors; "),
        (lambda out, aux: {out}, r"output is not supported: expected Tensor, but got set as output; "),
    ],
)
def test_an_output_that_no_pipeline_can_carry_is_refused(give: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_sequential(Heads(give), torch.randn(2, 4))
